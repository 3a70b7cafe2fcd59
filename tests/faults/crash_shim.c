/* Put before the C library by LD_PRELOAD: sees every call that changes the disk below one directory, writes a line of
 * each into a log, and at one of them ends the process, tears the write in two, or fails. Nothing of what is tested
 * takes part: it sees what Python, torch and their C code do. Ranks of a test ask for it with crash_begin. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum way { WATCH, KILL, HALF, FULL, BROKEN }; /* of tests/faults/crash_server.py */
enum verdict { GO_ON, FAIL, TEAR };

static char under[PATH_MAX];
static size_t length; /* 0: nothing is watched */
static int report, chosen_way;
static long chosen, seen;

/* Disturbs the operation of that number, from 1, below `directory`, an absolute path without links. */
void crash_begin(const char *directory, int log, long operation, int way) {
  snprintf(under, sizeof under, "%s", directory);
  report = log, chosen = operation, chosen_way = way, seen = 0;
  length = strlen(under);
}

void crash_end(void) { length = 0; }

#define REAL(name)                                                      \
  ({                                                                    \
    static typeof(&name) real;                                          \
    if (!real) real = (typeof(&name))dlsym(RTLD_NEXT, #name);           \
    real;                                                               \
  })

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

/* The absolute path of a file: of `path` from the directory `at`, or of the descriptor `at` itself without a path. */
static void find(char *found, size_t size, int at, const char *path) {
  char link[64], from[PATH_MAX];
  if (path && path[0] == '/') {
    snprintf(found, size, "%s", path);
    return;
  }
  if (at == AT_FDCWD)
    snprintf(link, sizeof link, "/proc/self/cwd");
  else
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
  ssize_t n = readlink(link, from, sizeof from - 1);
  from[n > 0 ? n : 0] = 0;
  snprintf(found, size, path ? "%s/%s" : "%s", from, path);
}

/* Every operation asks, before it does anything, what is to become of it. `bytes`: of a write. */
static enum verdict ask(const char *kind, size_t bytes, int at, const char *path) {
  char place[2 * PATH_MAX], line[2 * PATH_MAX + 64];
  if (!length) return GO_ON;
  find(place, sizeof place, at, path);
  if (strncmp(place, under, length) || (place[length] && place[length] != '/')) return GO_ON;
  long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
  int n = snprintf(line, sizeof line, "%s %zu %s\n", kind, bytes, place);
  if (REAL(write)(report, line, n) != n) die();
  if (number != chosen || chosen_way == WATCH) return GO_ON;
  if (chosen_way == HALF && bytes) return TEAR;
  if (chosen_way == KILL || chosen_way == HALF) die();
  errno = chosen_way == FULL ? ENOSPC : EIO;
  return FAIL;
}

#define OR_FAIL(kind, at, path) \
  if (ask(kind, 0, at, path) != GO_ON) return -1

/* ---------------------------------------------------------------- opening */

#define CHANGES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))
#define MODE(flags)                    \
  mode_t mode = 0;                     \
  if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list rest;                      \
    va_start(rest, flags);             \
    mode = va_arg(rest, mode_t);       \
    va_end(rest);                      \
  }

#define OPEN(name)                                       \
  int name(const char *path, int flags, ...) {           \
    MODE(flags)                                          \
    if (CHANGES(flags)) OR_FAIL("open", AT_FDCWD, path); \
    return REAL(name)(path, flags, mode);                \
  }
#define OPENAT(name)                                     \
  int name(int at, const char *path, int flags, ...) {   \
    MODE(flags)                                          \
    if (CHANGES(flags)) OR_FAIL("open", at, path);       \
    return REAL(name)(at, path, flags, mode);            \
  }
#define CREAT(name)                                      \
  int name(const char *path, mode_t mode) {              \
    OR_FAIL("open", AT_FDCWD, path);                     \
    return REAL(name)(path, mode);                       \
  }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) CREAT(creat) CREAT(creat64)

/* ---------------------------------------------------------------- writing */

#define WRITE(kind, bytes, fd, whole, half)  \
  switch (ask(kind, bytes, fd, NULL)) {      \
    case GO_ON: return whole;                \
    case FAIL: return -1;                    \
    case TEAR: if (half >= 0) die();         \
  }                                          \
  die();                                     \
  return -1

ssize_t write(int fd, const void *data, size_t n) {
  WRITE("write", n, fd, REAL(write)(fd, data, n), REAL(write)(fd, data, n / 2));
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
  WRITE("write", n, fd, REAL(pwrite)(fd, data, n, at), REAL(pwrite)(fd, data, n / 2, at));
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
  WRITE("write", n, fd, REAL(pwrite64)(fd, data, n, at), REAL(pwrite64)(fd, data, n / 2, at));
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
  size_t n = 0;
  for (int i = 0; i < count; i++) n += parts[i].iov_len;
  WRITE("write", n, fd, REAL(writev)(fd, parts, count), REAL(writev)(fd, parts, count / 2));
}
ssize_t sendfile(int fd, int from, off_t *at, size_t n) {
  WRITE("write", n, fd, REAL(sendfile)(fd, from, at, n), REAL(sendfile)(fd, from, at, n / 2));
}
ssize_t sendfile64(int fd, int from, off64_t *at, size_t n) {
  WRITE("write", n, fd, REAL(sendfile64)(fd, from, at, n), REAL(sendfile64)(fd, from, at, n / 2));
}
ssize_t copy_file_range(int from, off64_t *at, int fd, off64_t *to, size_t n, unsigned flags) {
  WRITE("write", n, fd, REAL(copy_file_range)(from, at, fd, to, n, flags),
        REAL(copy_file_range)(from, at, fd, to, n / 2, flags));
}

/* ---------------------------------------------------------------- all else */

#define ON_FD(name, kind, given, ...) \
  int name given {                    \
    OR_FAIL(kind, fd, NULL);          \
    return REAL(name)(__VA_ARGS__);   \
  }
ON_FD(fsync, "fsync", (int fd), fd)
ON_FD(fdatasync, "fsync", (int fd), fd)
ON_FD(ftruncate, "truncate", (int fd, off_t n), fd, n)
ON_FD(ftruncate64, "truncate", (int fd, off64_t n), fd, n)
ON_FD(fallocate, "allocate", (int fd, int mode, off_t at, off_t n), fd, mode, at, n)
ON_FD(fallocate64, "allocate", (int fd, int mode, off64_t at, off64_t n), fd, mode, at, n)

#define ON_PATH(name, kind, at, path, given, ...) \
  int name given {                                \
    OR_FAIL(kind, at, path);                      \
    return REAL(name)(__VA_ARGS__);               \
  }
ON_PATH(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
ON_PATH(mkdirat, "mkdir", at, path, (int at, const char *path, mode_t mode), at, path, mode)
ON_PATH(rmdir, "rmdir", AT_FDCWD, path, (const char *path), path)
ON_PATH(unlink, "unlink", AT_FDCWD, path, (const char *path), path)
ON_PATH(unlinkat, "unlink", at, path, (int at, const char *path, int flags), at, path, flags)
ON_PATH(remove, "unlink", AT_FDCWD, path, (const char *path), path)
ON_PATH(rename, "rename", AT_FDCWD, from, (const char *from, const char *to), from, to)
ON_PATH(renameat, "rename", a, from, (int a, const char *from, int b, const char *to), a, from, b, to)
ON_PATH(renameat2, "rename", a, from, (int a, const char *from, int b, const char *to, unsigned flags), a, from, b, to,
        flags)
ON_PATH(link, "link", AT_FDCWD, to, (const char *from, const char *to), from, to)
ON_PATH(linkat, "link", b, to, (int a, const char *from, int b, const char *to, int flags), a, from, b, to, flags)
ON_PATH(symlink, "link", AT_FDCWD, to, (const char *from, const char *to), from, to)
ON_PATH(truncate, "truncate", AT_FDCWD, path, (const char *path, off_t n), path, n)
ON_PATH(truncate64, "truncate", AT_FDCWD, path, (const char *path, off64_t n), path, n)
