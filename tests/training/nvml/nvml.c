/* NVIDIA's library as far as Vigil asks it, over two GPUs that a text file describes, read again at every call:
 *   hang                 no call returns until the word is gone
 *   lost I               GPU I has fallen off the bus
 *   mig I                GPU I tells neither its use nor its power
 *   use I PERCENT        what GPU I is used
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, LOST = 15 };
struct { unsigned gpu, memory; } typedef use_t;
struct { unsigned long long total, free, used; } typedef memory_t;
struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } typedef pci_t;
static int gpus[2] = {0, 1};

static int is(const char *word, int gpu, int *value) {
    char line[64], found[16];
    int which, number = 0, seen = 0;
    FILE *file = fopen(getenv("NVML_STATE"), "r");
    while (file && fgets(line, sizeof line, file)) {
        which = -1;
        int count = sscanf(line, "%15s %d %d", found, &which, &number);
        if (count >= 1 && !strcmp(found, word) && (gpu < 0 || which == gpu)) {
            seen = 1;
            if (value && count == 3) *value = number;
        }
    }
    if (file) fclose(file);
    return seen;
}

static int ask(void *handle) {
    while (is("hang", -1, NULL)) usleep(5000);
    return handle && is("lost", *(int *)handle, NULL) ? LOST : OK;
}

static int text(char *to, unsigned size, const char *format, int gpu) {
    snprintf(to, size, format, gpu);
    return OK;
}

int nvmlInit_v2(void) { return ask(NULL); }
int nvmlInitWithFlags(unsigned flags) { return ask(NULL); }
int nvmlShutdown(void) { return ask(NULL); }
const char *nvmlErrorString(int code) { return "stand-in"; }
int nvmlSystemGetDriverVersion(char *to, unsigned size) { return text(to, size, "570.86.15", 0); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12080; return ask(NULL); }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return ask(NULL); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= 2) return INVALID;
    *handle = &gpus[index];
    return ask(*handle);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    int index;
    if (sscanf(uuid, "GPU-%d", &index) != 1 || index < 0 || index >= 2) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(index, handle);
}
int nvmlDeviceGetUUID(void *handle, char *to, unsigned size) {
    int failed = ask(handle);
    return failed ? failed : text(to, size, "GPU-%d", *(int *)handle);
}
int nvmlDeviceGetName(void *handle, char *to, unsigned size) {
    int failed = ask(handle);
    return failed ? failed : text(to, size, "NVIDIA H100 %d", *(int *)handle);
}
int nvmlDeviceGetPciInfo_v3(void *handle, pci_t *pci) {
    memset(pci, 0, sizeof *pci);
    int failed = ask(handle);
    return failed ? failed : text(pci->bus_id, sizeof pci->bus_id, "00000000:%02d:00.0", 5 + *(int *)handle);
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    memory->total = 80ULL << 30;
    memory->used = 30ULL << 30;
    return ask(handle);
}
int nvmlDeviceGetUtilizationRates(void *handle, use_t *use) {
    int percent = 90, failed = ask(handle);
    if (failed || is("mig", *(int *)handle, NULL)) return failed ? failed : NOT_SUPPORTED;
    is("use", *(int *)handle, &percent);
    use->gpu = percent;
    return OK;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    int failed = ask(handle);
    if (failed || is("mig", *(int *)handle, NULL)) return failed ? failed : NOT_SUPPORTED;
    *milliwatts = 350000;
    return OK;
}
