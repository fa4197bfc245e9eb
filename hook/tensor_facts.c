/* What tensors are and where they lie, of many in one call: DLPack's exchange of facts by C functions, in a loop.

   A library of tensors offers it as `type.__dlpack_c_exchange_api__` (DLPack 1.3, as in torch 2.13),
   a capsule around a table of functions whose layout is fixed for a major version. So this needs no headers of torch,
   and with Python's stable ABI one build serves all versions of both. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MAJOR 1
#define WORDS_FIXED 5
#define DIMENSIONS_USUAL 4

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

static int note(const struct exchange *exchange, PyObject *tensor, struct words *words)
{
    struct facts found;
    if (exchange->look(tensor, &found))
        return -1;
    size_t dimensions = (size_t)found.dimensions;
    if (make_room(words, WORDS_FIXED + 2 * dimensions))
        return -1;
    int64_t *at = words->items + words->count;
    *at++ = (int64_t)(intptr_t)Py_TYPE(tensor);
    *at++ = (int64_t)(intptr_t)found.data;
    *at++ = (int64_t)found.offset_bytes;
    *at++ = (int64_t)found.device_type << 32 | (uint32_t)found.device_number;
    *at++ = (int64_t)found.dimensions << 32 | (int64_t)found.type_lanes << 16 | found.type_bits << 8 | found.type_code;
    for (size_t each = 0; each < dimensions; each++) {
        *at++ = found.shape[each];
        *at++ = found.strides ? found.strides[each] : -1;
    }
    words->count = (size_t)(at - words->items);
    return 0;
}

PyDoc_STRVAR(facts_doc, "facts(exchange, tensors, /)\n--\n\n"
                        "Return type, address, device, dtype, shape and strides of each tensor of a tuple, as bytes\n"
                        "that are equal where all of these are. `exchange`: torch.Tensor.__dlpack_c_exchange_api__.");

static PyObject *facts(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule, *tensors, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "OO!:facts", &capsule, &PyTuple_Type, &tensors))
        return NULL;
    const struct exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!exchange)
        return NULL;
    if (exchange->major != MAJOR || !exchange->look)
        return PyErr_Format(PyExc_NotImplementedError, "DLPack %u.%u is not known here, or tells no facts",
                            exchange->major, exchange->minor);
    struct words words = {NULL, 0, 0};
    Py_ssize_t count = PyTuple_Size(tensors);
    if (make_room(&words, (size_t)count * (WORDS_FIXED + 2 * DIMENSIONS_USUAL) / 2))
        return NULL;
    for (Py_ssize_t each = 0; each < count; each++)
        if (note(exchange, PyTuple_GetItem(tensors, each), &words))
            goto end;
    result = PyBytes_FromStringAndSize((const char *)words.items, (Py_ssize_t)(words.count * sizeof *words.items));
end:
    PyMem_Free(words.items);
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
