/* File operations that fail on request. Loaded with LD_PRELOAD; see injector.py.

   Operations that create, write, rename, remove, truncate or flush below one folder are counted, and the n-th
     KILL      kills the process before it happens,
     HALF      writes half of its bytes and kills the process, or kills it before any other operation,
     NO_SPACE  and all later ones that need room fail with ENOSPC,
     FAIL_ONCE fails with EIO. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL, HALF, NO_SPACE, FAIL_ONCE };
enum { PROCEED, REFUSE, WRITE_HALF };

static char below[PATH_MAX];
static int mode = COUNT;
static long at = -1;
static atomic_long operations;
static atomic_int armed;

void fault_arm(const char *folder, int how, long which)
{
    snprintf(below, sizeof below, "%s/", folder);
    mode = how;
    at = which;
    operations = 0;
    armed = 1;
}

long fault_operations(void)
{
    return operations;
}

/* Where a path leads, relative to the folder that a descriptor stands for. */
static int is_below(int folder, const char *path)
{
    char whole[2 * PATH_MAX], link[64];
    ssize_t length = 0;
    if (path[0] != '/') {
        if (folder == AT_FDCWD) {
            if (!getcwd(whole, PATH_MAX))
                return 0;
            length = strlen(whole);
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            length = readlink(link, whole, PATH_MAX - 1);
            if (length < 0)
                return 0;
        }
        whole[length++] = '/';
    }
    snprintf(whole + length, sizeof whole - length, "%s", path);
    return strncmp(whole, below, strlen(below)) == 0;
}

static int is_open_below(int file)
{
    char link[64], whole[PATH_MAX + 2];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, whole, PATH_MAX);
    if (length < 0)
        return 0;
    whole[length] = '/'; /* the folder itself is one of ours */
    whole[length + 1] = 0;
    return strncmp(whole, below, strlen(below)) == 0;
}

static int happens(int ours, int needs_room, int writes)
{
    if (!armed || !ours)
        return PROCEED;
    long number = atomic_fetch_add(&operations, 1);
    if (mode == NO_SPACE && number >= at && needs_room) {
        errno = ENOSPC;
        return REFUSE;
    }
    if (number != at || mode == COUNT || mode == NO_SPACE)
        return PROCEED;
    if (mode == FAIL_ONCE) {
        errno = EIO;
        return REFUSE;
    }
    if (mode == HALF && writes)
        return WRITE_HALF;
    kill(getpid(), SIGKILL);
    return REFUSE;
}

#define REAL(name) ({ static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })
#define UNLESS_REFUSED(ours, room) if (happens(ours, room, 0) == REFUSE) return -1

ssize_t write(int file, const void *bytes, size_t count)
{
    int answer = armed ? happens(is_open_below(file), 1, 1) : PROCEED;
    if (answer == REFUSE)
        return -1;
    if (answer == WRITE_HALF) {
        REAL(write)(file, bytes, count / 2);
        kill(getpid(), SIGKILL);
    }
    return REAL(write)(file, bytes, count);
}

ssize_t writev(int file, const struct iovec *parts, int count)
{
    int answer = armed ? happens(is_open_below(file), 1, 1) : PROCEED;
    if (answer == REFUSE)
        return -1;
    if (answer == WRITE_HALF) {
        REAL(write)(file, parts[0].iov_base, parts[0].iov_len / 2);
        kill(getpid(), SIGKILL);
    }
    return REAL(writev)(file, parts, count);
}

ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t where)
{
    UNLESS_REFUSED(armed && is_open_below(file), 1);
    return REAL(pwrite64)(file, bytes, count, where);
}

static int makes_a_file(int folder, const char *path, int flags)
{
    return armed && (flags & (O_CREAT | O_TRUNC)) && is_below(folder, path);
}

#define OPEN(name, folder, given, real)                                        \
    {                                                                          \
        mode_t access = 0;                                                     \
        if (flags & O_CREAT) {                                                 \
            va_list rest;                                                      \
            va_start(rest, flags);                                             \
            access = va_arg(rest, mode_t);                                     \
            va_end(rest);                                                      \
        }                                                                      \
        UNLESS_REFUSED(makes_a_file(folder, path, flags), 1);                  \
        return real;                                                           \
    }

int open(const char *path, int flags, ...) OPEN(open, AT_FDCWD, path, REAL(open)(path, flags, access))
int open64(const char *path, int flags, ...) OPEN(open64, AT_FDCWD, path, REAL(open64)(path, flags, access))
int openat(int folder, const char *path, int flags, ...) OPEN(openat, folder, path, REAL(openat)(folder, path, flags, access))
int openat64(int folder, const char *path, int flags, ...)
    OPEN(openat64, folder, path, REAL(openat64)(folder, path, flags, access))

static int stream_refused(const char *path, const char *kind)
{
    return kind[0] != 'r' && happens(armed && is_below(AT_FDCWD, path), 1, 0) == REFUSE;
}

FILE *fopen(const char *path, const char *kind)
{
    return stream_refused(path, kind) ? NULL : REAL(fopen)(path, kind);
}

FILE *fopen64(const char *path, const char *kind)
{
    return stream_refused(path, kind) ? NULL : REAL(fopen64)(path, kind);
}

int rename(const char *old, const char *new)
{
    UNLESS_REFUSED(armed && is_below(AT_FDCWD, new), 0);
    return REAL(rename)(old, new);
}

int renameat(int from, const char *old, int to, const char *new)
{
    UNLESS_REFUSED(armed && is_below(to, new), 0);
    return REAL(renameat)(from, old, to, new);
}

int unlink(const char *path)
{
    UNLESS_REFUSED(armed && is_below(AT_FDCWD, path), 0);
    return REAL(unlink)(path);
}

int unlinkat(int folder, const char *path, int flags)
{
    UNLESS_REFUSED(armed && is_below(folder, path), 0);
    return REAL(unlinkat)(folder, path, flags);
}

int mkdir(const char *path, mode_t access)
{
    UNLESS_REFUSED(armed && is_below(AT_FDCWD, path), 1);
    return REAL(mkdir)(path, access);
}

int rmdir(const char *path)
{
    UNLESS_REFUSED(armed && is_below(AT_FDCWD, path), 0);
    return REAL(rmdir)(path);
}

int ftruncate64(int file, off64_t length)
{
    UNLESS_REFUSED(armed && is_open_below(file), 1);
    return REAL(ftruncate64)(file, length);
}

int fsync(int file)
{
    UNLESS_REFUSED(armed && is_open_below(file), 0);
    return REAL(fsync)(file);
}
