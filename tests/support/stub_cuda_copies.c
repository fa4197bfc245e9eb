/* A driver's library for tests of everstep.hook.cuda_memcpy, with structures and calls as cuda.h of CUDA 12.8 declares
   them: its one stream copies at once, between any addresses. Error 1 is what may not be. */
#include <stdint.h>
#include <string.h>

typedef enum { INVALID, STREAM_ORDER, DURING_CALL, ANY_ORDER } access_order;
typedef struct {
    enum { NOWHERE, DEVICE, HOST } type;
    int id;
} location;
typedef struct {
    access_order order;
    location source, target;
    unsigned flags;
} attributes;

static int stream, context;
int batches, last_count, depth;

void *stub_stream(void)
{
    return &stream;
}

static int memcpy_batch_async(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, attributes *given,
                              size_t *firsts, size_t attribute_count, size_t *failed, void *handle)
{
    if (handle != &stream || depth != 1 || attribute_count != 1 || firsts[0] || given->order != STREAM_ORDER)
        return 1;
    if (given->source.type || given->source.id || given->target.type || given->target.id || given->flags > 1)
        return 1;
    *failed = SIZE_MAX;
    for (size_t index = 0; index < count; index++)
        memcpy((void *)targets[index], (void *)sources[index], sizes[index]);
    batches++;
    last_count = (int)count;
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    *status = strcmp(name, "cuMemcpyBatchAsync") != 0 || version != 12080 || flags;
    *function = *status ? 0 : (void *)memcpy_batch_async;
    return *status ? 500 : 0;
}

int cuStreamGetCtx(void *handle, void **found)
{
    *found = &context;
    return handle != &stream;
}

int cuCtxPushCurrent_v2(void *given)
{
    depth++;
    return given != &context;
}

int cuCtxPopCurrent_v2(void **popped)
{
    *popped = &context;
    depth--;
    return 0;
}

int cuCtxGetDevice(int *device)
{
    *device = 0;
    return depth != 1;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute == 91 && !device;
    return 0;
}

int cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void *handle)
{
    (void)target, (void)source, (void)size, (void)handle;
    return 1; /* nothing is to be copied one by one */
}

int cuGetErrorName(int code, const char **name)
{
    *name = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : "another";
    return 0;
}
