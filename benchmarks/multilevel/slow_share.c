/* A shared file system of limited speed, for any number of processes: LD_PRELOAD this. Bytes written to or read from
 * files below STEPWELL_BENCH_SHARE wait their turn, all processes in one queue, which is kept in the file that
 * STEPWELL_BENCH_QUEUE names. The rate is STEPWELL_BENCH_RATE bytes a second. Other files are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static _Atomic int64_t *free_at; /* nanoseconds of the monotonic clock, which all processes share */
static double rate;
static const char *share;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

__attribute__((constructor)) static void open_queue(void) {
    const char *name = getenv("STEPWELL_BENCH_QUEUE"), *text = getenv("STEPWELL_BENCH_RATE");
    share = getenv("STEPWELL_BENCH_SHARE");
    if (!name || !text || !share)
        return;
    int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, 4096))
        return;
    void *room = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (room == MAP_FAILED)
        return;
    rate = atof(text);
    free_at = room;
}

static ssize_t pay(int fd, ssize_t bytes) {
    char link[64], path[4096];
    if (!free_at || bytes < 65536)
        return bytes;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0 || strncmp(path, share, strlen(share)))
        return bytes;
    int64_t cost = (int64_t)(bytes / rate * 1e9), seen = atomic_load(free_at), end;
    do {
        int64_t start = now();
        end = (seen > start ? seen : start) + cost;
    } while (!atomic_compare_exchange_weak(free_at, &seen, end));
    int64_t left = end - now();
    if (left > 0) {
        struct timespec t = {left / 1000000000, left % 1000000000};
        nanosleep(&t, NULL);
    }
    return bytes;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define WRAP(name, parameters, arguments) \
    ssize_t name parameters { REAL(name); return pay(fd, real arguments); }

WRAP(write, (int fd, const void *data, size_t count), (fd, data, count))
WRAP(writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
WRAP(pwrite, (int fd, const void *data, size_t count, off_t at), (fd, data, count, at))
WRAP(pwrite64, (int fd, const void *data, size_t count, off64_t at), (fd, data, count, at))
WRAP(pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
WRAP(pwritev64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
WRAP(pwritev2, (int fd, const struct iovec *parts, int count, off_t at, int flags), (fd, parts, count, at, flags))
WRAP(pwritev64v2, (int fd, const struct iovec *parts, int count, off64_t at, int flags), (fd, parts, count, at, flags))
WRAP(read, (int fd, void *data, size_t count), (fd, data, count))
WRAP(readv, (int fd, const struct iovec *parts, int count), (fd, parts, count))
WRAP(pread, (int fd, void *data, size_t count, off_t at), (fd, data, count, at))
WRAP(pread64, (int fd, void *data, size_t count, off64_t at), (fd, data, count, at))
WRAP(preadv, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
WRAP(preadv64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
WRAP(preadv2, (int fd, const struct iovec *parts, int count, off_t at, int flags), (fd, parts, count, at, flags))
WRAP(preadv64v2, (int fd, const struct iovec *parts, int count, off64_t at, int flags), (fd, parts, count, at, flags))
