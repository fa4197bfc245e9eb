/* A driver's library for tests of everstep.daemon.cli.gpu_child: each call is logged, and fails with the number that the
   variable STUB_<CALL> says. What may not be (calls out of order, memory that cannot be written to) is error 1. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int initialized, current;
static void *context = &context, *registered;

static int answer(const char *call)
{
    char name[64];
    snprintf(name, sizeof name, "STUB_%s", call);
    const char *code = getenv(name);
    FILE *log = fopen(getenv("STUB_LOG"), "a");
    fprintf(log, "%s\n", call);
    fclose(log);
    return code ? atoi(code) : 0;
}

int cuInit(unsigned flags)
{
    int code = answer("cuInit");
    initialized = !code && !flags;
    return code;
}

int cuDeviceGetCount(int *count)
{
    const char *given = getenv("STUB_COUNT");
    int code = answer("cuDeviceGetCount");
    if (!initialized)
        return 3; /* CUDA_ERROR_NOT_INITIALIZED */
    *count = given ? atoi(given) : 1;
    return code;
}

int cuDevicePrimaryCtxRetain(void **made, int device)
{
    int code = answer("cuDevicePrimaryCtxRetain");
    if (device)
        return 101; /* CUDA_ERROR_INVALID_DEVICE */
    *made = context;
    return code;
}

int cuCtxSetCurrent(void *given)
{
    int code = answer("cuCtxSetCurrent");
    current = given == context;
    return current ? code : 1;
}

int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags)
{
    int code = answer("cuMemHostRegister_v2");
    if (!current)
        return 201; /* CUDA_ERROR_INVALID_CONTEXT */
    if (code)
        return code;
    if (flags || registered || (size_t)memory % sysconf(_SC_PAGESIZE) || size != 4 << 20)
        return 1;
    ((volatile char *)memory)[0] = ((volatile char *)memory)[size - 1] = 1;
    registered = memory;
    return 0;
}

int cuMemHostUnregister(void *memory)
{
    int code = answer("cuMemHostUnregister");
    return memory == registered ? code : 713; /* CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED */
}
