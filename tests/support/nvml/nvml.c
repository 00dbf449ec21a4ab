/* A stand-in for libnvidia-ml.so.1, for tests: the real pynvml loads it. What it says stands in
 * nvml.control beside the library, read at every call: "count=2", "1.temperature=91",
 * "1.error=15" (every call on GPU 1), "1.error.nvmlDeviceGetUUID=999", "1.hang=1" (until the line is
 * gone), "1.hang.nvmlDeviceGetPowerUsage=1", "0.xid=79:1" (delivered once for each number after the
 * colon), "prints=1" (on standard output). With -DOLD it lacks what old drivers lack. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { int index; } Dev;
typedef struct { u32 version; int sensor, temperature; } Temperature;
typedef struct { u32 version; u64 total, reserved, free, used; } Memory;
typedef struct { u32 version; char uuid[16]; u32 status, clique, state, health; } Fabric;
typedef struct { u32 pid; u64 used; u32 gi, ci; } Process;
typedef struct { Dev *device; u64 type, data; u32 gi, ci; } Event;

enum { MAX = 16, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10, VERSION = 25 };
static Dev devices[MAX];
static int delivered[MAX];

static int lookup(const char *key, char *value, size_t size)
{
    static char path[4096];
    char line[512];
    Dl_info info;
    int found = 0;
    if (!path[0] && dladdr((void *)lookup, &info)) {
        const char *slash = strrchr(info.dli_fname, '/');
        snprintf(path, sizeof path, "%.*s/nvml.control", (int)(slash - info.dli_fname), info.dli_fname);
    }
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    size_t length = strlen(key);
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, key, length) && line[length] == '=') {
            line[strcspn(line, "\n")] = 0;
            snprintf(value, size, "%s", line + length + 1);
            found = 1;
        }
    fclose(file);
    return found;
}

static long long number(int dev, const char *key, long long otherwise)
{
    char name[128], value[256];
    if (dev < 0) snprintf(name, sizeof name, "%s", key);
    else snprintf(name, sizeof name, "%d.%s", dev, key);
    return lookup(name, value, sizeof value) ? atoll(value) : otherwise;
}

static int enter(int dev, const char *function)
{
    char key[160];
    snprintf(key, sizeof key, "hang.%s", function);
    while (number(dev, key, 0) || number(dev, "hang", 0)) usleep(10000);
    snprintf(key, sizeof key, "error.%s", function);
    return (int)number(dev, key, number(dev, "error", 0));
}

#define ENTER(d) do { int e = enter((d)->index, __func__); if (e) return e; } while (0)
#define SIMPLE(function, type, key, otherwise) \
    int function(Dev *d, type *out) { ENTER(d); return give(d, key, otherwise, out, sizeof *out); }

/* The value "none" is a card that does not have it. */
static int give(Dev *d, const char *key, long long otherwise, void *out, size_t size)
{
    char name[128], text[256];
    snprintf(name, sizeof name, "%d.%s", d->index, key);
    if (lookup(name, text, sizeof text) && !strcmp(text, "none")) return NOT_SUPPORTED;
    u64 value = (u64)number(d->index, key, otherwise);
    memcpy(out, &value, size);
    return 0;
}

int nvmlInitWithFlags(u32 flags)
{
    (void)flags;
    for (int i = 0; i < MAX; i++) devices[i].index = i;
    if (number(-1, "prints", 0)) { puts("{\"ready\": 99}"); fflush(stdout); }
    return enter(-1, "nvmlInitWithFlags");
}
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the stand-in"; }
int nvmlSystemGetDriverVersion(char *out, u32 size) { snprintf(out, size, "999.1"); return 0; }
int nvmlDeviceGetCount_v2(u32 *out) { *out = (u32)number(-1, "count", 2); return enter(-1, __func__); }

int nvmlDeviceGetHandleByIndex_v2(u32 index, Dev **out)
{
    if ((int)index >= number(-1, "count", 2) || index >= MAX) return INVALID;
    *out = &devices[index];
    return enter((int)index, __func__);
}
int nvmlDeviceGetUUID(Dev *d, char *out, u32 size)
{
    ENTER(d);
    snprintf(out, size, "GPU-%08lld", number(d->index, "uuid", d->index));
    return 0;
}
int nvmlDeviceGetName(Dev *d, char *out, u32 size) { ENTER(d); snprintf(out, size, "Stand-in H100"); return 0; }
int nvmlDeviceGetPciInfo_v3(Dev *d, char *out)
{
    ENTER(d);
    memset(out, 0, 68);
    snprintf(out + 36, 32, "00000000:%02X:00.0", 0x10 + d->index); /* busId follows busIdLegacy and 5 words */
    return 0;
}

int nvmlDeviceGetTemperatureThreshold(Dev *d, int which, u32 *out)
{
    ENTER(d);
    return give(d, which == 1 ? "slowdown" : "memory_max", which == 1 ? 90 : 105, out, sizeof *out);
}
SIMPLE(nvmlDeviceGetPowerUsage, u32, "power", 300000)
SIMPLE(nvmlDeviceGetRetiredPagesPendingStatus, u32, "pages_pending", 0)
SIMPLE(nvmlDeviceGetCurrPcieLinkWidth, u32, "pcie_width", 16)
SIMPLE(nvmlDeviceGetMaxPcieLinkWidth, u32, "pcie_width_max", 16)
SIMPLE(nvmlDeviceGetCurrPcieLinkGeneration, u32, "pcie_generation", 5)
SIMPLE(nvmlDeviceGetMaxPcieLinkGeneration, u32, "pcie_generation_max", 5)
SIMPLE(nvmlDeviceGetPcieReplayCounter, u32, "pcie_replays", 0)

#ifdef OLD
int nvmlDeviceGetTemperature(Dev *d, int sensor, u32 *out) { (void)sensor; ENTER(d); return give(d, "temperature", 45, out, 4); }
SIMPLE(nvmlDeviceGetCurrentClocksThrottleReasons, u64, "slowdown_reasons", 0)
int nvmlDeviceGetMemoryInfo(Dev *d, u64 out[3]) { ENTER(d); out[0] = 80ull << 30; out[2] = 1ull << 30; out[1] = out[0] - out[2]; return 0; }
#else
int nvmlDeviceGetTemperatureV(Dev *d, Temperature *out)
{
    ENTER(d);
    if (out->version != 0x100000C) return VERSION;
    return give(d, "temperature", 45, &out->temperature, 4);
}
SIMPLE(nvmlDeviceGetCurrentClocksEventReasons, u64, "slowdown_reasons", 0)
int nvmlDeviceGetMemoryInfo_v2(Dev *d, Memory *out)
{
    ENTER(d);
    if (out->version != 0x02000028) return VERSION;
    out->total = 80ull << 30;
    out->used = (u64)number(d->index, "memory_used", 1 << 30);
    out->free = out->total - out->used;
    return 0;
}
int nvmlDeviceGetSramEccErrorStatus(Dev *d, u32 *out)
{
    ENTER(d);
    if (out[0] != 0x1000068) return VERSION;
    out[24] = (u32)number(d->index, "sram", 0); /* bThresholdExceeded, after a word, padding, 11 counters */
    return 0;
}
int nvmlDeviceGetGpuFabricInfoV(Dev *d, Fabric *out)
{
    ENTER(d);
    if (out->version != 0x02000024) return VERSION;
    out->state = (u32)number(d->index, "fabric_state", 0);
    out->status = (u32)number(d->index, "fabric_status", 0);
    out->health = (u32)number(d->index, "fabric_health", 0);
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Dev *d, u32 *count, Process *out)
{
    ENTER(d);
    u32 pid = (u32)number(d->index, "pid", 0), room = *count;
    *count = pid != 0;
    if (room < *count) return TOO_SMALL;
    if (pid) { memset(out, 0, sizeof *out); out->pid = pid; out->used = 1 << 20; }
    return 0;
}
int nvmlDeviceGetRemappedRows(Dev *d, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed)
{
    ENTER(d);
    *corrected = 0;
    *uncorrected = (u32)number(d->index, "rows_remapped", 0);
    *pending = (u32)number(d->index, "remap_pending", 0);
    *failed = (u32)number(d->index, "remap_failed", 0);
    return 0;
}
int nvmlDeviceGetMigMode(Dev *d, u32 *now, u32 *pending)
{
    ENTER(d);
    *now = *pending = (u32)number(d->index, "mig", 0);
    return 0;
}
#endif

int nvmlDeviceGetUtilizationRates(Dev *d, u32 out[2])
{
    ENTER(d);
    out[1] = 0;
    return give(d, "busy", 0, out, 4);
}
int nvmlDeviceGetTotalEccErrors(Dev *d, int type, int counter, u64 *out)
{
    ENTER(d);
    if (type != 1) return INVALID;
    return give(d, counter ? "ecc_aggregate" : "ecc_volatile", 0, out, sizeof *out);
}
int nvmlDeviceGetNvLinkState(Dev *d, u32 link, u32 *out)
{
    char states[64] = "1111";
    char key[32];
    ENTER(d);
    snprintf(key, sizeof key, "%d.links", d->index);
    lookup(key, states, sizeof states);
    if (!strcmp(states, "none")) return NOT_SUPPORTED;
    if (link >= strlen(states)) return INVALID;
    *out = states[link] == '1';
    return 0;
}
typedef struct { u32 field, scope; long long at, took; u32 type; int status; union { u32 u; u64 l; } value; } Field;
int nvmlDeviceGetFieldValues(Dev *d, int count, Field *f)
{
    ENTER(d);
    for (int i = 0; i < count; i++) {
        const char *key = f[i].field == 82 ? "memory_temperature" : f[i].field == 230 ? "recovery_action"
                        : f[i].field == 52 ? "nvlink_errors" : NULL;
        f[i].type = 3;
        f[i].value.l = 0;
        f[i].status = key ? give(d, key, 0, &f[i].value.l, 8) : NOT_SUPPORTED;
#ifdef OLD
        f[i].status = INVALID;
#endif
    }
    return 0;
}

int nvmlEventSetCreate(void **out) { *out = devices; return 0; }
int nvmlEventSetFree(void *set) { (void)set; return 0; }
int nvmlDeviceRegisterEvents(Dev *d, u64 types, void *set) { (void)types; (void)set; ENTER(d); return 0; }
int nvmlEventSetWait_v2(void *set, Event *out, u32 timeout_ms)
{
    (void)set;
    for (u32 waited = 0; waited < timeout_ms; waited += 20, usleep(20000))
        for (int i = 0; i < number(-1, "count", 2) && i < MAX; i++) {
            char key[32], text[64], *serial;
            snprintf(key, sizeof key, "%d.xid", i);
            if (!lookup(key, text, sizeof text) || !(serial = strchr(text, ':'))) continue;
            if (atoi(serial + 1) == delivered[i]) continue;
            delivered[i] = atoi(serial + 1);
            out->device = &devices[i];
            out->type = 8;
            out->data = strtoull(text, NULL, 10);
            return 0;
        }
    return TIMEOUT;
}
