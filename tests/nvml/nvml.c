/* The part of NVIDIA's library that Vigil calls, over GPUs that a text file ($NVML_STATE) describes. It is read again when
 * it changes. A line names a GPU, or * for all of them and for the library itself; later lines win:
 *   * count 8                       GPUs that there are
 *   3 gpu_percent 97                a value; NUMBERS below lists all with their defaults
 *   3 gpu_percent 30~90/60          a wave of 60 s between the two, each GPU a little later
 *   3 field.138 5+1000              a counter that grows by 1000 a second; field values are field.ID, activity gpm.ID
 *   3 watts !3                      this error instead (3: not supported)
 *   3 lost 1                        every call about it fails: it has fallen off the bus
 *   3 hang 1                        no call about it returns until the line is gone; with *: no call at all
 *   * reload 1                      whoever opened the library under another number must open it again
 *   * init 2000                     the library takes 2 s to open
 *   * init !9, * call !18           the library cannot be opened; every call fails
 *   3 uuid GPU-…, 3 name …          another GPU in the slot
 *   3 minor 0                       N of its /dev/nvidiaN, if that differs from its index
 *   3 mig 1                         it is in MIG mode: calls return its slices, not its use
 *   3 slice INSTANCE MIB            a MIG slice
 *   3 process PID MIB [INSTANCE]    a process that uses it
 *   3 event ID TYPE DATA            an event, sent to waiting callers when the line appears; ids only rise
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10, LOST = 15 };
enum { MAX_GPUS = 64, MAX_SLICES = 8, MAX_LINES = 2048, ALL = -1, WHOLE = -1 };
#define UNREPORTED -1e300

typedef unsigned long long u64;
typedef struct { int index, slice; } gpu_t; /* slice: which of its slices, by place; WHOLE: the GPU */
typedef struct { int gpu; char name[32], text[96]; } line_t;
typedef struct { u64 wanted[MAX_GPUS]; int seen; } set_t;
typedef struct { int index; } sample_t;
typedef struct { unsigned gpu, memory; } use_t;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory2_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned pid; u64 memory; unsigned instance, compute; } process_t;
typedef struct { unsigned id, scope; long long at, took; unsigned type, error; u64 value; } field_t;
typedef struct { gpu_t *gpu; u64 type, data; unsigned instance, compute; } event_t;
typedef struct { unsigned version; u64 counts[11]; unsigned is_exceeded; } sram_t;
typedef struct { unsigned id, error; double value; const char *names[3]; } metric_t;
typedef struct { unsigned version, count; sample_t *first, *second; metric_t metrics[]; } metrics_t;

static const struct { const char *name; double value; } NUMBERS[] = {
    {"count", 8}, {"hang", 0}, {"lost", 0}, {"reload", 0}, {"init", 0}, {"call", 0}, {"wait", 0}, {"cuda", 12080},
    {"gpu_percent", 90}, {"memory_mib", 30720}, {"memory_total_mib", 81920}, {"memory_reserved_mib", 512},
    {"temperature_c", 60}, {"watts", 350}, {"power_cap_watts", 700}, {"sm_mhz", 1980}, {"throttle", 0},
    {"slowdown_c", 89}, {"margin_c", UNREPORTED}, {"numa_node", 0}, {"ecc_corrected", 0}, {"ecc_uncorrected", 0},
    {"ecc_corrected_lifetime", 2}, {"ecc_uncorrected_lifetime", 0}, {"sram_threshold_exceeded", 0},
    {"remapped_corrected", 0}, {"remapped_uncorrected", 0}, {"remapped_pending", 0}, {"remapped_failed", 0},
    {"pcie_replays", 0}, {"pcie_generation", 5}, {"pcie_generation_most", 5}, {"pcie_width", 16},
    {"pcie_width_most", 16}, {"nvlink", 1}, {"mig", 0}, {"events", 0x8 | 0x100 | 0x8000}, {"gpm", 1},
    {"gpm.2", 75}, {"gpm.20", 800}, {"gpm.21", 1200}, {"field.82", 65}, {"field.91", 18}, {"field.230", 0},
};

static gpu_t gpus[MAX_GPUS], slices[MAX_GPUS][MAX_SLICES];
static line_t lines[MAX_LINES];
static int line_count, opened_under = -1;
static struct stat read_at;

/* The file. */

static void refresh(void) {
    struct stat now;
    const char *path = getenv("NVML_STATE");
    if (!path || stat(path, &now)) return;
    if (now.st_ino == read_at.st_ino && !memcmp(&now.st_mtim, &read_at.st_mtim, sizeof now.st_mtim)) return;
    FILE *file = fopen(path, "r");
    char text[160], target[16];
    if (!file) return;
    read_at = now;
    for (line_count = 0; line_count < MAX_LINES && fgets(text, sizeof text, file);) {
        line_t *line = &lines[line_count];
        if (sscanf(text, "%15s %31s %95[^\n]", target, line->name, line->text) != 3) continue;
        line->gpu = *target == '*' ? ALL : atoi(target);
        line_count++;
    }
    fclose(file);
}

static const char *described(int index, const char *name) {
    for (int i = line_count - 1; i >= 0; i--)
        if ((lines[i].gpu == index || lines[i].gpu == ALL) && !strcmp(lines[i].name, name)) return lines[i].text;
    return NULL;
}

static double monotonic(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

/* What the file says of it, else what NUMBERS does; an NVML error, or OK. */
static int lookup(int index, const char *name, double *value) {
    const char *text = described(index, name);
    double low, high, period;
    *value = UNREPORTED;
    if (text && *text == '!') return atoi(text + 1);
    if (text && sscanf(text, "%lf~%lf/%lf", &low, &high, &period) == 3) {
        double turns = monotonic() / period - index / 8.0, part = turns - (long long)turns;
        *value = low + (high - low) * (part < 0.5 ? 2 * part : 2 - 2 * part);
    } else if (text && sscanf(text, "%lf+%lf", &low, &high) == 2)
        *value = low + high * monotonic();
    else if (text)
        *value = strtod(text, NULL);
    for (size_t i = 0; !text && i < sizeof NUMBERS / sizeof *NUMBERS; i++)
        if (!strcmp(name, NUMBERS[i].name)) *value = NUMBERS[i].value;
    return *value == UNREPORTED ? UNSUPPORTED : OK;
}

static double setting(int index, const char *name) {
    double value;
    return lookup(index, name, &value) ? 0 : value;
}

/* Comes back when nothing hangs; whether the library is open, and the GPU there. */
static int ready(const gpu_t *gpu) {
    int index = gpu ? gpu->index : ALL, failed;
    double ignored;
    for (refresh(); setting(index, "hang"); refresh()) usleep(5000);
    if (opened_under != (int)setting(ALL, "reload")) return UNINITIALIZED;
    if ((failed = lookup(ALL, "call", &ignored))) return failed;
    return gpu && setting(index, "lost") ? LOST : OK;
}

static int number(const gpu_t *gpu, const char *name, double *value) {
    int failed = ready(gpu);
    return failed ? failed : lookup(gpu->index, name, value);
}

static int text(const gpu_t *gpu, const char *name, char *to, unsigned size, const char *format, ...) {
    int failed = ready(gpu), index = gpu ? gpu->index : ALL;
    const char *value = described(index, name);
    if (failed) return failed;
    if (value && *value == '!') return atoi(value + 1);
    if (value) snprintf(to, size, "%s", value);
    else snprintf(to, size, format, index);
    return OK;
}

/* Values of a line that has several, such as a process: those of the n-th line by this name. */
static int nth(int index, const char *name, int n, long long found[3]) {
    for (int i = 0; i < line_count; i++)
        if (lines[i].gpu == index && !strcmp(lines[i].name, name) && n-- == 0)
            return sscanf(lines[i].text, "%lld %lld %lld", &found[0], &found[1], &found[2]);
    return 0;
}

#define NUMBER(function, type, name, scale) \
    int function(gpu_t *gpu, type *to) { \
        double value; \
        int failed = number(gpu, name, &value); \
        if (!failed) *to = (type)(value * scale); \
        return failed; \
    }

/* The library and its GPUs. */

int nvmlInitWithFlags(unsigned flags) {
    double milliseconds = 0;
    for (refresh(); setting(ALL, "hang"); refresh()) usleep(5000);
    int failed = lookup(ALL, "init", &milliseconds);
    usleep((useconds_t)(1000 * milliseconds));
    if (!failed) opened_under = (int)setting(ALL, "reload");
    for (int i = 0; i < MAX_GPUS; i++) {
        gpus[i] = (gpu_t){i, WHOLE};
        for (int n = 0; n < MAX_SLICES; n++) slices[i][n] = (gpu_t){i, n};
    }
    return failed;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { opened_under = -1; return OK; }
const char *nvmlErrorString(int code) {
    return code == 9 ? "Driver Not Loaded" : code == 18 ? "Driver/library version mismatch" : "stand-in";
}
int nvmlSystemGetDriverVersion(char *to, unsigned size) { return text(NULL, "driver", to, size, "570.86.15"); }
int nvmlSystemGetNVMLVersion(char *to, unsigned size) { return text(NULL, "nvml", to, size, "12.570.86.15"); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = (int)setting(ALL, "cuda"); return ready(NULL); }
int nvmlDeviceGetCount_v2(unsigned *count) {
    int failed = ready(NULL);
    *count = (unsigned)setting(ALL, "count");
    return failed;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **to) {
    unsigned count;
    int failed = nvmlDeviceGetCount_v2(&count);
    if (failed || index >= count) return failed ? failed : INVALID;
    *to = &gpus[index];
    return ready(*to);
}

int nvmlDeviceGetUUID(gpu_t *gpu, char *to, unsigned size) {
    long long part[3];
    if (gpu->slice == WHOLE) return text(gpu, "uuid", to, size, "GPU-57a4d100-0000-4000-8000-%012d");
    if (!nth(gpu->index, "slice", gpu->slice, part)) return NOT_FOUND;
    snprintf(to, size, "MIG-57a4d100-%04d-4000-8000-%012lld", gpu->index, part[0]);
    return ready(gpu);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu_t **to) {
    unsigned count;
    char found[96];
    int failed = nvmlDeviceGetCount_v2(&count);
    for (unsigned i = 0; !failed && i < count; i++)
        for (int n = WHOLE; n < MAX_SLICES; n++) {
            *to = n == WHOLE ? &gpus[i] : &slices[i][n];
            int unknown = nvmlDeviceGetUUID(*to, found, sizeof found);
            if (!unknown && !strcmp(found, uuid)) return OK;
        }
    return failed ? failed : NOT_FOUND;
}
#define TEXT(function, name, format) \
    int function(gpu_t *gpu, char *to, unsigned size) { return text(gpu, name, to, size, format); }
TEXT(nvmlDeviceGetName, "name", "NVIDIA H100 80GB HBM3")
TEXT(nvmlDeviceGetSerial, "serial", "16500000%05d")
TEXT(nvmlDeviceGetVbiosVersion, "vbios", "96.00.74.00.01")
TEXT(nvmlDeviceGetInforomImageVersion, "inforom", "G520.0200.00.05")
int nvmlDeviceGetIndex(gpu_t *gpu, unsigned *to) { *to = gpu->index; return ready(gpu); }
int nvmlDeviceGetMinorNumber(gpu_t *gpu, unsigned *to) {
    const char *minor = described(gpu->index, "minor");
    *to = minor ? (unsigned)atoi(minor) : (unsigned)gpu->index;
    return gpu->slice == WHOLE ? ready(gpu) : UNSUPPORTED;
}
int nvmlDeviceGetPciInfo_v3(gpu_t *gpu, pci_t *to) {
    memset(to, 0, sizeof *to);
    to->bus = 5 + 16 * gpu->index % 256;
    snprintf(to->bus_id, sizeof to->bus_id, "00000000:%02X:00.0", to->bus);
    return ready(gpu);
}

/* What a GPU does. */

static int memory(gpu_t *gpu, double *total, double *used, double *reserved) {
    long long part[3];
    int failed = number(gpu, "memory_total_mib", total);
    if (!failed) failed = number(gpu, "memory_mib", used);
    if (!failed) failed = number(gpu, "memory_reserved_mib", reserved);
    if (!failed && gpu->slice != WHOLE) {
        if (nth(gpu->index, "slice", gpu->slice, part) < 2) return NOT_FOUND;
        *total = part[1], *used = part[1] / 2, *reserved = 0;
    }
    *total *= 1 << 20, *used *= 1 << 20, *reserved *= 1 << 20;
    return failed;
}
int nvmlDeviceGetMemoryInfo(gpu_t *gpu, memory_t *to) {
    double total, used, reserved;
    int failed = memory(gpu, &total, &used, &reserved);
    if (!failed) *to = (memory_t){(u64)total, (u64)(total - used - reserved), (u64)(used + reserved)};
    return failed;
}
int nvmlDeviceGetMemoryInfo_v2(gpu_t *gpu, memory2_t *to) {
    double total, used, reserved;
    int failed = memory(gpu, &total, &used, &reserved);
    if (!failed) *to = (memory2_t){to->version, (u64)total, (u64)reserved, (u64)(total - used - reserved), (u64)used};
    return failed;
}
int nvmlDeviceGetUtilizationRates(gpu_t *gpu, use_t *use) {
    double percent;
    int failed = number(gpu, "gpu_percent", &percent);
    if (!failed && (gpu->slice != WHOLE || setting(gpu->index, "mig"))) return UNSUPPORTED;
    if (!failed) *use = (use_t){(unsigned)percent, (unsigned)percent / 2};
    return failed;
}
NUMBER(power, unsigned, "watts", 1000)
int nvmlDeviceGetPowerUsage(gpu_t *gpu, unsigned *to) { return gpu->slice == WHOLE ? power(gpu, to) : UNSUPPORTED; }
NUMBER(temperature, unsigned, "temperature_c", 1)
int nvmlDeviceGetTemperature(gpu_t *gpu, unsigned sensor, unsigned *to) { return temperature(gpu, to); }
NUMBER(sm_clock, unsigned, "sm_mhz", 1)
int nvmlDeviceGetClockInfo(gpu_t *gpu, unsigned which, unsigned *to) { return sm_clock(gpu, to); }
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, "throttle", 1)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, "throttle", 1)

int nvmlDeviceGetFieldValues(gpu_t *gpu, int count, field_t *fields) {
    char name[24];
    double value;
    int failed = ready(gpu);
    for (int i = 0; !failed && i < count; i++) {
        snprintf(name, sizeof name, "field.%u", fields[i].id);
        fields[i].error = lookup(gpu->index, name, &value);
        fields[i].type = 3; /* of 64 bits; the temperature margin is one of 32, and may be below zero */
        fields[i].value = (u64)value;
        if (fields[i].id == 194) fields[i].type = 5, fields[i].value = (unsigned)(int)value;
    }
    return failed;
}

int nvmlGpmQueryDeviceSupport(gpu_t *gpu, unsigned *to) { to[1] = setting(gpu->index, "gpm") != 0; return ready(gpu); }
int nvmlGpmSampleAlloc(sample_t **to) { *to = calloc(1, sizeof **to); return ready(NULL); }
int nvmlGpmSampleFree(sample_t *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(gpu_t *gpu, sample_t *sample) { sample->index = gpu->index; return ready(gpu); }
int nvmlGpmMetricsGet(metrics_t *metrics) {
    char name[24];
    for (unsigned i = 0; i < metrics->count; i++) {
        snprintf(name, sizeof name, "gpm.%u", metrics->metrics[i].id);
        metrics->metrics[i].error = lookup(metrics->second->index, name, &metrics->metrics[i].value);
    }
    return ready(NULL);
}

int nvmlDeviceGetComputeRunningProcesses_v3(gpu_t *gpu, unsigned *count, process_t *to) {
    double ignored;
    long long one[3];
    int failed = ready(gpu), n = 0, values;
    if (!failed && described(gpu->index, "processes")) failed = lookup(gpu->index, "processes", &ignored);
    if (failed) return failed;
    for (; (values = nth(gpu->index, "process", n, one)) >= 2; n++)
        if (to && n < (int)*count) to[n] = (process_t){one[0], (u64)one[1] << 20, values == 3 ? one[2] : -1, -1};
    int is_small = n > (int)*count;
    *count = n;
    return is_small ? TOO_SMALL : OK;
}

/* What changes slowly. */

NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power_cap_watts", 1000)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, "pcie_replays", 1)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "pcie_generation", 1)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "pcie_generation_most", 1)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie_width", 1)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "pcie_width_most", 1)
NUMBER(nvmlDeviceGetNumaNodeId, int, "numa_node", 1)
NUMBER(slowdown, unsigned, "slowdown_c", 1)
int nvmlDeviceGetTemperatureThreshold(gpu_t *gpu, unsigned which, unsigned *to) { return slowdown(gpu, to); }
NUMBER(margin, int, "margin_c", 1)
int nvmlDeviceGetMarginTemperature(gpu_t *gpu, int *to) { return margin(gpu, to + 1); }
int nvmlDeviceGetTotalEccErrors(gpu_t *gpu, unsigned kind, unsigned since, u64 *to) {
    char name[32];
    double value;
    snprintf(name, sizeof name, "ecc_%scorrected%s", kind ? "un" : "", since ? "_lifetime" : "");
    int failed = number(gpu, name, &value);
    if (!failed) *to = (u64)value;
    return failed;
}
int nvmlDeviceGetRemappedRows(gpu_t *gpu, unsigned *cor, unsigned *unc, unsigned *pending, unsigned *failure) {
    int failed = ready(gpu);
    *cor = setting(gpu->index, "remapped_corrected"), *unc = setting(gpu->index, "remapped_uncorrected");
    *pending = setting(gpu->index, "remapped_pending"), *failure = setting(gpu->index, "remapped_failed");
    return !failed && setting(gpu->index, "mig") ? UNSUPPORTED : failed;
}
int nvmlDeviceGetSramEccErrorStatus(gpu_t *gpu, sram_t *to) {
    double value;
    int failed = number(gpu, "sram_threshold_exceeded", &value);
    if (!failed) to->is_exceeded = value != 0;
    return failed;
}

/* How GPUs are connected: by links to a switch; in halves to two sockets. */

int nvmlDeviceGetNvLinkState(gpu_t *gpu, unsigned link, unsigned *to) {
    char name[24];
    int failed = ready(gpu);
    snprintf(name, sizeof name, "nvlink.%u", link);
    *to = setting(gpu->index, described(gpu->index, name) ? name : "nvlink") != 0;
    return failed;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu_t *gpu, unsigned link, pci_t *to) {
    memset(to, 0, sizeof *to);
    snprintf(to->bus_id, sizeof to->bus_id, "00000000:C1:00.0");
    return ready(gpu);
}
int nvmlDeviceGetP2PStatus(gpu_t *one, gpu_t *other, unsigned what, unsigned *to) { *to = 0; return ready(one); }
int nvmlDeviceGetTopologyCommonAncestor(gpu_t *one, gpu_t *other, unsigned *to) {
    *to = one->index / 4 == other->index / 4 ? 40 : 50;
    return ready(one);
}

/* Slices. */

NUMBER(mig, unsigned, "mig", 1)
int nvmlDeviceGetMigMode(gpu_t *gpu, unsigned *now, unsigned *later) {
    int failed = mig(gpu, now);
    *later = *now;
    return failed;
}
int nvmlDeviceGetMaxMigDeviceCount(gpu_t *gpu, unsigned *to) { *to = 7; return ready(gpu); }
int nvmlDeviceGetMigDeviceHandleByIndex(gpu_t *gpu, unsigned place, gpu_t **to) {
    long long part[3];
    *to = &slices[gpu->index][place];
    return place < MAX_SLICES && nth(gpu->index, "slice", place, part) ? ready(gpu) : NOT_FOUND;
}
int nvmlDeviceIsMigDeviceHandle(gpu_t *gpu, unsigned *to) { *to = gpu->slice != WHOLE; return ready(NULL); }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu_t *gpu, gpu_t **to) { *to = &gpus[gpu->index]; return ready(*to); }
int nvmlDeviceGetGpuInstanceId(gpu_t *gpu, unsigned *to) {
    long long part[3];
    if (gpu->slice == WHOLE || !nth(gpu->index, "slice", gpu->slice, part)) return NOT_FOUND;
    *to = part[0];
    return ready(gpu);
}
int nvmlDeviceGetComputeInstanceId(gpu_t *gpu, unsigned *to) {
    *to = 0;
    return gpu->slice == WHOLE ? UNSUPPORTED : ready(gpu);
}

/* Events. */

static int newest_event(void) {
    long long one[3];
    int newest = 0;
    for (int i = 0; i < MAX_GPUS; i++)
        for (int n = 0; nth(i, "event", n, one) == 3; n++)
            if (one[0] > newest) newest = one[0];
    return newest;
}
static int next_event(set_t *set, event_t *to) {
    long long one[3], least = 1LL << 62;
    for (int i = 0; i < MAX_GPUS; i++)
        for (int n = 0; nth(i, "event", n, one) == 3; n++)
            if (one[0] > set->seen && one[0] < least && (u64)one[1] & set->wanted[i]) {
                least = one[0];
                *to = (event_t){&gpus[i], one[1], one[2], -1, -1};
            }
    if (least == 1LL << 62) return 0;
    set->seen = least;
    return 1;
}
/* As cheap as the driver's own wait: until something changes in the folder of the file. */
static void wait_for_change(int milliseconds) {
    static int watch = -1;
    char folder[4096], changes[4096];
    if (watch < 0) {
        snprintf(folder, sizeof folder, "%s", getenv("NVML_STATE"));
        *strrchr(folder, '/') = 0;
        watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
        inotify_add_watch(watch, folder, IN_MOVED_TO | IN_CLOSE_WRITE);
        return; /* and read once more: it may have changed just before */
    }
    poll(&(struct pollfd){watch, POLLIN, 0}, 1, milliseconds);
    while (read(watch, changes, sizeof changes) > 0) continue;
}
NUMBER(nvmlDeviceGetSupportedEventTypes, u64, "events", 1)
int nvmlEventSetCreate(set_t **to) { *to = calloc(1, sizeof **to); (*to)->seen = newest_event(); return ready(NULL); }
int nvmlEventSetFree(set_t *set) { free(set); return OK; }
int nvmlDeviceRegisterEvents(gpu_t *gpu, u64 types, set_t *set) {
    int failed = ready(gpu);
    if (!failed && types & ~(u64)setting(gpu->index, "events")) return UNSUPPORTED;
    set->wanted[gpu->index] |= types;
    return failed;
}
int nvmlEventSetWait_v2(set_t *set, event_t *to, unsigned milliseconds) {
    double ignored, until = monotonic() + milliseconds / 1e3;
    for (;;) {
        int failed = ready(NULL);
        if (!failed) failed = lookup(ALL, "wait", &ignored);
        if (failed || next_event(set, to)) return failed;
        if (monotonic() >= until) return TIMEOUT;
        wait_for_change((int)((until - monotonic()) * 1000) + 1);
    }
}
