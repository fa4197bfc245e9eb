/* Copies that leave the processor's caches to those who compute, and many small ones in one call.

   memcpy stores through the caches: each line of the target is read before it is written over, and what training had
   there goes. Stores that pass them by read nothing and evict nothing, so that a copy of a state larger than the caches
   takes two thirds of the time (ADR 0093). Only the C library's names and types are needed: Python calls by address. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LINE_BYTES 64
/* So far ahead the source is fetched, past the caches that others use. */
#define AHEAD_BYTES 1024
/* A smaller copy is not worth it. */
#define STREAMED_BYTES_MIN 2048
/* Which piece further on is fetched: small ones are in no order that a processor could guess. */
#define PIECES_AHEAD 8

#ifdef __x86_64__
#include <emmintrin.h>

static void stream_lines(char *to, const char *from, size_t lines)
{
    for (; lines; lines--, to += LINE_BYTES, from += LINE_BYTES) {
        _mm_prefetch(from + AHEAD_BYTES, _MM_HINT_NTA);
        __m128i first = _mm_loadu_si128((const __m128i *)from), second = _mm_loadu_si128((const __m128i *)from + 1);
        __m128i third = _mm_loadu_si128((const __m128i *)from + 2), fourth = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, first);
        _mm_stream_si128((__m128i *)to + 1, second);
        _mm_stream_si128((__m128i *)to + 2, third);
        _mm_stream_si128((__m128i *)to + 3, fourth);
    }
    _mm_sfence(); /* whoever is told of the copy sees it */
}
#else
static void stream_lines(char *to, const char *from, size_t lines)
{
    memcpy(to, from, lines * LINE_BYTES);
}
#endif

static void copy(char *to, const char *from, size_t size)
{
    if (size < STREAMED_BYTES_MIN) {
        if (size) /* else there need not be a place */
            memcpy(to, from, size);
        return;
    }
    size_t head = -(uintptr_t)to % LINE_BYTES, lines = (size - head) / LINE_BYTES, done = head + lines * LINE_BYTES;
    memcpy(to, from, head);
    stream_lines(to + head, from + head, lines);
    memcpy(to + done, from + done, size - done);
}

/* Copy bytes; the two places must not overlap. */
void everstep_copy(uintptr_t to, uintptr_t from, size_t size)
{
    copy((char *)to, (const char *)from, size);
}

/* As struct iovec. */
struct piece {
    char *at;
    size_t size;
};

/* Copy the bytes of all sources, one behind the other, to the targets, which have room for as many and overlap none. */
void everstep_gather(uintptr_t targets, uintptr_t sources, size_t source_count)
{
    const struct piece *target = (const struct piece *)targets, *source = (const struct piece *)sources;
    size_t filled = 0; /* of the target */
    for (size_t each = 0; each < source_count; each++) {
        if (each + PIECES_AHEAD < source_count)
            __builtin_prefetch(source[each + PIECES_AHEAD].at);
        for (size_t done = 0, part; done < source[each].size; done += part, filled += part) {
            if (filled == target->size) {
                target++;
                filled = 0;
            }
            size_t room = target->size - filled, left = source[each].size - done;
            part = left < room ? left : room;
            copy(target->at + filled, source[each].at + done, part);
        }
    }
}
