/* A stand-in for libnvidia-ml.so.1: answers what the file $STAND_IN_NVML says, read anew at each call.
 *
 * A line is a device (- for the library itself), what is asked, and its value; a name of an error in place of a value
 * is returned as that error, and what has no line is not supported:
 *     - init 18
 *     - devices 2
 *     0 name NVIDIA A100
 *     0 process 4242 1073741824
 * `energy` is the value at its first reading, and more by `counted` at each later one than at the one before.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned index; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

typedef struct {
    unsigned id, scope;
    long long at, latency;
    int type, error;
    union { unsigned milliwatts; double widest; };
} Field;

enum { POWER_INSTANT = 186, SUCCESS = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };
static Device devices[8] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};

/* The n-th value of (device, key) into text; an error where the file has one, or none at all. */
static int look(const char *device, const char *key, int n, char *text, size_t room) {
    const char *path = getenv("STAND_IN_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512], own[16], name[64];
    int error = NOT_SUPPORTED, at = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%15s %63s %n", own, name, &at) < 2 || strcmp(own, device) || strcmp(name, key)) continue;
        if (n-- > 0) continue;
        line[strcspn(line, "\n")] = 0;
        error = SUCCESS;
        if (sscanf(line + at, "error %d", &error) != 1) snprintf(text, room, "%s", line + at);
        break;
    }
    if (file) fclose(file);
    return error;
}

static int number(Device *device, const char *key, unsigned long long *value) {
    char name[16], text[256];
    snprintf(name, sizeof name, "%u", device->index);
    int error = look(name, key, 0, text, sizeof text);
    if (!error) *value = strtoull(text, NULL, 0);
    return error;
}

static int text_of(Device *device, const char *key, char *text, unsigned room) {
    char name[16];
    snprintf(name, sizeof name, "%u", device->index);
    return look(name, key, 0, text, room);
}

static int whole(Device *device, const char *key, unsigned *value) {
    unsigned long long wide;
    int error = number(device, key, &wide);
    if (!error) *value = (unsigned)wide;
    return error;
}

int nvmlInitWithFlags(unsigned flags) {
    char text[64];
    (void)flags;
    int error = look("-", "init", 0, text, sizeof text);
    return error == NOT_SUPPORTED ? SUCCESS : error;
}
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) {
    return error == 18 ? "Driver/library version mismatch" : error == 9 ? "Driver Not Loaded"
         : error == 15 ? "GPU is lost" : error == 3 ? "Not Supported" : "Unknown Error";
}
int nvmlSystemGetDriverVersion(char *text, unsigned room) { return look("-", "driver", 0, text, room); }
int nvmlDeviceGetCount_v2(unsigned *count) {
    char text[64];
    int error = look("-", "devices", 0, text, sizeof text);
    if (!error) *count = (unsigned)atoi(text);
    return error;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    char text[64];
    *device = &devices[index];
    int error = text_of(*device, "handle", text, sizeof text);
    return error == NOT_SUPPORTED ? SUCCESS : error;
}
int nvmlDeviceGetName(Device *device, char *text, unsigned room) { return text_of(device, "name", text, room); }
int nvmlDeviceGetUUID(Device *device, char *text, unsigned room) { return text_of(device, "uuid", text, room); }
int nvmlDeviceGetMigMode(Device *device, unsigned *now, unsigned *later) {
    int error = whole(device, "mig", now);
    *later = *now;
    return error;
}
int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates) {
    rates->memory = 0;
    return whole(device, "utilization", &rates->gpu);
}
int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    memory->total = memory->free = 0;
    return number(device, "memory", &memory->used);
}
int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) { return whole(device, "power", milliwatts); }
int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields) {
    for (int i = 0; i < count; i++)
        fields[i].error = fields[i].id == POWER_INSTANT ? whole(device, "instant_power", &fields[i].milliwatts)
                                                        : NOT_SUPPORTED;
    return SUCCESS;
}
int nvmlDeviceGetTotalEnergyConsumption(Device *device, unsigned long long *millijoules) {
    static int readings[16];
    unsigned long long counted = 0;
    int error = number(device, "energy", millijoules);
    if (!error && !number(device, "counted", &counted)) *millijoules += counted * readings[device->index % 16]++;
    return error;
}
int nvmlDeviceGetClockInfo(Device *device, int kind, unsigned *mhz) {
    return whole(device, kind == 1 ? "sm_clock" : "memory_clock", mhz);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *bits) {
    return number(device, "throttling", bits);
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *processes) {
    char name[16], text[128];
    unsigned room = *count, there = 0;
    int error;
    snprintf(name, sizeof name, "%u", device->index);
    while (!(error = look(name, "process", (int)there, text, sizeof text))) {
        if (processes && there < room) {
            Process one = {0, ~0ULL, 0, 0};
            sscanf(text, "%u %llu", &one.pid, &one.used);
            processes[there] = one;
        }
        there++;
    }
    if (error != NOT_SUPPORTED) return error;
    *count = there;
    return there > room ? INSUFFICIENT_SIZE : SUCCESS;
}
