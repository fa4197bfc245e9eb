/* What tensors are and where they lie, of many in one call: DLPack's exchange of facts by C functions, in a loop.

   A library of tensors offers it as `type.__dlpack_c_exchange_api__` (DLPack 1.3, as in torch 2.13),
   a capsule around a table of functions whose layout is fixed for a major version. So this needs no headers of torch,
   and with Python's stable ABI one build serves all versions of both.

   Of tensors that are to be noted it reads what Python reads, too, as long as the processor has them at hand: all of
   this waits for memory. So what tensors further on will need is fetched ahead. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MAJOR 1
#define WORDS_FIXED 5
#define WORDS_USUAL (WORDS_FIXED + 4)

/* Which tensor further on, counted from the one that is looked at, has what fetched. */
#define OBJECT_AHEAD 12
#define WRAPPED_AHEAD 8
#define FIELDS_AHEAD 4

/* Of what torch's tensors wrap (2.13): its size and that of a processor's cache line, and the fields that lead on. */
#define WRAPPED_BYTES_MAX 512
#define WRAPPED_LINES 3
#define LINE_BYTES 64
#define MEMORY 2
#define WRITES 5

struct facts {
    void *data;
    int32_t device_type, device_number;
    int32_t dimensions;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t *shape, *strides; /* lent by the tensor; strides may be missing where it is contiguous */
    uint64_t offset_bytes;
};

struct exchange {
    uint32_t major, minor;
    struct exchange *older;
    void *unused[3];
    int (*look)(void *tensor, struct facts *found); /* may be missing */
};

struct words {
    int64_t *items;
    size_t count, room;
};

static int make_room(struct words *words, size_t wanted)
{
    if (words->count + wanted <= words->room)
        return 0;
    size_t room = 2 * (words->count + wanted);
    int64_t *items = PyMem_Realloc(words->items, room * sizeof *items);
    if (!items) {
        PyErr_NoMemory();
        return -1;
    }
    words->items = items;
    words->room = room;
    return 0;
}

static int append(struct words *words, PyObject *tensor, const struct facts *found)
{
    size_t dimensions = (size_t)found->dimensions;
    if (make_room(words, WORDS_FIXED + 2 * dimensions))
        return -1;
    int64_t *at = words->items + words->count;
    *at++ = (int64_t)(intptr_t)Py_TYPE(tensor);
    *at++ = (int64_t)(intptr_t)found->data;
    *at++ = (int64_t)found->offset_bytes;
    *at++ = (int64_t)found->device_type << 32 | (uint32_t)found->device_number;
    *at++ = (int64_t)found->dimensions << 32 | (int64_t)found->type_lanes << 16 | found->type_bits << 8 | found->type_code;
    for (size_t each = 0; each < dimensions; each++) {
        *at++ = found->shape[each];
        *at++ = found->strides ? found->strides[each] : -1;
    }
    words->count = (size_t)(at - words->items);
    return 0;
}

/* Return what the first field behind Python's header points to: of torch's tensors, what they wrap. */
static void **wrapped(PyObject *tensor)
{
    return ((void ***)tensor)[2];
}

/* Tell whether that is the struct in which the shape lies, so that the words before the shape are fields of it. */
static int holds_shape(PyObject *tensor, const int64_t *shape)
{
    uintptr_t begin = (uintptr_t)wrapped(tensor), at = (uintptr_t)shape;
    return begin && at > begin + WRITES * sizeof(void *) && at < begin + WRAPPED_BYTES_MAX;
}

/* Hints for the processor, about those of the looked-at tensor's type: if fields mean something else in another torch,
   it is slower and no less right. */
static void fetch_ahead(PyObject *tensors, Py_ssize_t each, Py_ssize_t count, int is_known)
{
    PyTypeObject *type = Py_TYPE(PyTuple_GetItem(tensors, each));
    PyObject *tensor;
    if (each + OBJECT_AHEAD < count)
        __builtin_prefetch(PyTuple_GetItem(tensors, each + OBJECT_AHEAD));
    if (!is_known)
        return;
    if (each + WRAPPED_AHEAD < count && Py_TYPE(tensor = PyTuple_GetItem(tensors, each + WRAPPED_AHEAD)) == type)
        for (int line = 0; line < WRAPPED_LINES; line++)
            __builtin_prefetch((char *)wrapped(tensor) + line * LINE_BYTES);
    if (each + FIELDS_AHEAD < count && Py_TYPE(tensor = PyTuple_GetItem(tensors, each + FIELDS_AHEAD)) == type &&
        wrapped(tensor)) {
        __builtin_prefetch(wrapped(tensor)[MEMORY]);
        __builtin_prefetch(wrapped(tensor)[WRITES]);
    }
}

PyDoc_STRVAR(facts_doc, "facts(exchange, tensors, noted, memory_of, /)\n--\n\n"
                        "Return type, address, device, dtype, shape and strides of each tensor of a tuple, as bytes\n"
                        "that are equal where all of these are; and lists of `_version` and `memory_of(tensor)` of the\n"
                        "first `noted` ones. `exchange`: torch.Tensor.__dlpack_c_exchange_api__.");

static PyObject *facts(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule, *tensors, *memory_of;
    Py_ssize_t noted;
    if (!PyArg_ParseTuple(arguments, "OO!nO:facts", &capsule, &PyTuple_Type, &tensors, &noted, &memory_of))
        return NULL;
    Py_ssize_t count = PyTuple_Size(tensors);
    if (noted < 0 || noted > count)
        return PyErr_Format(PyExc_ValueError, "%zd of %zd tensors are to be noted", noted, count);
    const struct exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!exchange)
        return NULL;
    if (exchange->major != MAJOR || !exchange->look)
        return PyErr_Format(PyExc_NotImplementedError, "DLPack %u.%u is not known here, or tells no facts",
                            exchange->major, exchange->minor);
    struct words words = {NULL, 0, 0};
    PyObject *result = NULL, *version = PyUnicode_InternFromString("_version");
    PyObject *versions = PyList_New(noted), *memories = PyList_New(noted);
    if (!version || !versions || !memories || make_room(&words, (size_t)count * WORDS_USUAL + 1))
        goto end;
    PyObject_GC_UnTrack(versions); /* until they are full, nobody may find them: calls below may collect garbage */
    PyObject_GC_UnTrack(memories);
    int is_known = 0;
    for (Py_ssize_t each = 0; each < count; each++) {
        PyObject *tensor = PyTuple_GetItem(tensors, each), *found;
        struct facts facts;
        if (exchange->look(tensor, &facts) || append(&words, tensor, &facts))
            goto end;
        is_known = is_known || holds_shape(tensor, facts.shape);
        fetch_ahead(tensors, each, count, is_known);
        if (each >= noted)
            continue;
        if (!(found = PyObject_GetAttr(tensor, version)) || PyList_SetItem(versions, each, found) ||
            !(found = PyObject_CallFunctionObjArgs(memory_of, tensor, NULL)) || PyList_SetItem(memories, each, found))
            goto end;
    }
    PyObject_GC_Track(versions);
    PyObject_GC_Track(memories);
    result = Py_BuildValue("y#OO", (const char *)words.items, (Py_ssize_t)(words.count * sizeof *words.items), versions,
                           memories);
end:
    PyMem_Free(words.items);
    Py_XDECREF(version);
    Py_XDECREF(versions);
    Py_XDECREF(memories);
    return result;
}

static PyMethodDef methods[] = {{"facts", facts, METH_VARARGS, facts_doc}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_tensor_facts", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__tensor_facts(void)
{
    return PyModuleDef_Init(&definition);
}
