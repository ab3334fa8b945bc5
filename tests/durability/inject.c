/* File operations that fail on request, loaded with LD_PRELOAD (trials.py).

   Operations that create, write, rename, remove, truncate or flush below one folder are counted. At the n-th KILL ends the
   process, HALF does so after half of the bytes are written, and from there on NO_SPACE refuses what needs room. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { COUNT, KILL, HALF, NO_SPACE };
static char below[PATH_MAX];
static int mode, armed;
static long at, operations;

void fault_arm(const char *folder, int kind, long number)
{
    snprintf(below, sizeof below, "%s/", folder);
    mode = kind, at = number, operations = 0, armed = 1;
}

long fault_operations(void) { return operations; }

/* Whether a path, relative to the folder of a descriptor, or the file of a descriptor (path NULL) is below the folder. */
static int ours(int file, const char *path)
{
    char whole[2 * PATH_MAX] = "", link[64];
    if (!armed)
        return 0;
    if (!path || path[0] != '/') {
        if (file == AT_FDCWD) {
            if (!getcwd(whole, PATH_MAX))
                return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", file);
            ssize_t length = readlink(link, whole, PATH_MAX - 1);
            if (length < 0)
                return 0;
            whole[length] = 0;
        }
        strcat(whole, "/"); /* the folder itself is one of ours */
    }
    strncat(whole, path ? path : "", PATH_MAX - 1);
    return strncmp(whole, below, strlen(below)) == 0;
}

/* Whether an operation on one of our files is refused; *half: to write half of the bytes and die. */
static int refused(int mine, int needs_room, int *half)
{
    if (!mine)
        return 0;
    long number = __atomic_fetch_add(&operations, 1, __ATOMIC_SEQ_CST);
    if (mode == NO_SPACE && number >= at && needs_room) {
        errno = ENOSPC;
        return 1;
    }
    if (number == at && (mode == KILL || mode == HALF)) {
        if (mode == HALF && half)
            *half = 1;
        else
            kill(getpid(), SIGKILL);
    }
    return 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define HOOK(name, parameters, arguments, mine, room) \
    int name parameters { return refused(mine, room, NULL) ? -1 : REAL(name) arguments; }

HOOK(rename, (const char *old, const char *new), (old, new), ours(AT_FDCWD, new), 0)
HOOK(renameat, (int from, const char *old, int to, const char *new), (from, old, to, new), ours(to, new), 0)
HOOK(unlink, (const char *path), (path), ours(AT_FDCWD, path), 0)
HOOK(unlinkat, (int folder, const char *path, int flags), (folder, path, flags), ours(folder, path), 0)
HOOK(mkdir, (const char *path, mode_t access), (path, access), ours(AT_FDCWD, path), 1)
HOOK(rmdir, (const char *path), (path), ours(AT_FDCWD, path), 0)
HOOK(ftruncate64, (int file, off64_t length), (file, length), ours(file, NULL), 1)
HOOK(fsync, (int file), (file), ours(file, NULL), 0)

ssize_t write(int file, const void *bytes, size_t count)
{
    int half = 0;
    if (refused(ours(file, NULL), 1, &half))
        return -1;
    ssize_t written = REAL(write)(file, bytes, half ? count / 2 : count);
    if (half)
        kill(getpid(), SIGKILL);
    return written;
}

#define OPEN(name, parameters, folder, call)                                     \
    int name parameters                                                          \
    {                                                                            \
        va_list rest;                                                            \
        va_start(rest, flags);                                                   \
        mode_t access = flags & O_CREAT ? va_arg(rest, mode_t) : 0;              \
        va_end(rest);                                                            \
        int makes = (flags & (O_CREAT | O_TRUNC)) != 0;                          \
        return refused(makes && ours(folder, path), 1, NULL) ? -1 : call;        \
    }

OPEN(open, (const char *path, int flags, ...), AT_FDCWD, REAL(open)(path, flags, access))
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, REAL(open64)(path, flags, access))
OPEN(openat, (int folder, const char *path, int flags, ...), folder, REAL(openat)(folder, path, flags, access))
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, REAL(openat64)(folder, path, flags, access))

FILE *fopen64(const char *path, const char *kind)
{
    return kind[0] != 'r' && refused(ours(AT_FDCWD, path), 1, NULL) ? NULL : REAL(fopen64)(path, kind);
}
