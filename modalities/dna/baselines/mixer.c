/* Counters of contexts and their log-linear mixing, base by base; mixer.py says what is computed and calls this. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BASES 4
#define DIGITS 9      /* of the words' prefixes whose places are in a table */
#define WORD 25       /* digits of a word */
#define MOST_ORDERS 32
#define MOST_EXPERTS 64

typedef struct {
    const int64_t *words;  /* sorted; digits 1 to 4 in base 5 and 0 behind the end of a sequence, the first most significant */
    const int64_t *starts; /* (5^DIGITS + 1) how many words are below each prefix */
} Trained;

typedef struct {
    uint64_t context; /* + 1; 0 is an empty slot */
    int32_t counts[BASES];
} Slot;

typedef struct {
    Slot *slots;
    uint64_t mask;
} Table;

static Slot *find(Table table, uint64_t context) {
    uint64_t hash = (context + 1) * 0x9E3779B97F4A7C15u;
    for (uint64_t at = hash >> 20;; at++) {
        Slot *slot = &table.slots[at & table.mask];
        if (!slot->context || slot->context == context + 1) return slot;
    }
}

static void count(Table table, uint64_t context, int base) {
    Slot *slot = find(table, context);
    slot->context = context + 1;
    slot->counts[base]++;
}

/* First place in words[low, high) that is not below `least`. */
static int64_t below(const int64_t *words, int64_t low, int64_t high, int64_t least) {
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (words[middle] < least) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Counts (orders, BASES) in the training rows of what follows the last k codes before `at`, for each k <= known.

   What follows context c on one strand is a word that begins with the other strand's: n(c x) = #(rc(x) rc(c) …), a longer
   context only adds digits at its end, and both strands are in `words`. */
static void count_trained(Trained trained, const uint8_t *at, int64_t known, const int32_t *orders, int number, int32_t *counts) {
    int64_t low[BASES], high[BASES], prefix[BASES], power = 1, scale[WORD + 1];
    for (int k = 0; k <= WORD; k++, power *= 5) scale[WORD - k] = power; /* of a prefix of k digits, as a word */
    for (int x = 0; x < BASES; x++) prefix[x] = BASES - x;
    for (int i = 0, k = 0; i < number && orders[i] <= known; i++) {
        for (; k < orders[i]; k++)
            for (int x = 0; x < BASES; x++) prefix[x] = 5 * prefix[x] + (BASES - at[-1 - k]);
        int size = k + 1;
        for (int x = 0; x < BASES; x++) {
            int64_t first = prefix[x] * scale[size], last = (prefix[x] + 1) * scale[size];
            if (size <= DIGITS) {
                low[x] = trained.starts[first / scale[DIGITS]];
                high[x] = trained.starts[last / scale[DIGITS]];
            } else {
                if (i == 0 || orders[i - 1] + 1 < DIGITS) { /* the places of the first digits bound the search */
                    low[x] = trained.starts[first / scale[DIGITS]];
                    high[x] = trained.starts[first / scale[DIGITS] + 1];
                }
                low[x] = below(trained.words, low[x], high[x], first);
                high[x] = below(trained.words, low[x], high[x], last);
            }
            counts[i * BASES + x] = (int32_t)(high[x] - low[x]);
        }
    }
}

static void centre(const int32_t *counts, double a, float *logs) {
    double found[BASES], mean = 0;
    for (int x = 0; x < BASES; x++) mean += (found[x] = log(counts[x] + a)) / BASES;
    for (int x = 0; x < BASES; x++) logs[x] = (float)(found[x] - mean);
}

/* Opinions of all experts on every base of one window.

   codes (length): bases, 0 to 3, or more for an unknown one.   orders, recent (number): k, and its counter of the window alone,
   or -1.   own: the window is among the training rows, and its words count only once they are read.
   logs (length, experts, BASES): centred log p.   longest (length): number of the longest context that was seen, from 1.
   Returns 0, or -1 without memory. */
int opinions(const uint8_t *codes, int64_t length, const int64_t *words, const int64_t *starts, const int32_t *orders,
             const int32_t *recent, int number, int experts, int own, float *logs, uint8_t *longest) {
    Trained trained = {words, starts};
    uint64_t slots = 16;
    while (slots < 4 * (uint64_t)length) slots *= 2;
    Table table = {malloc(slots * sizeof(Slot)), slots - 1};
    int32_t *counts = calloc(length * number * BASES, sizeof *counts), *inside = malloc(length * BASES * sizeof *inside);
    int32_t *known = malloc(length * sizeof *known);
    if (!table.slots || !counts || !inside || !known) {
        free(table.slots), free(counts), free(inside), free(known);
        return -1;
    }
    memset(logs, 0, length * experts * BASES * sizeof *logs);
    memset(longest, 0, length);
    for (int64_t t = 0; t < length; t++) { /* how many known bases directly precede it */
        known[t] = t && codes[t - 1] < BASES ? known[t - 1] + 1 : 0;
        count_trained(trained, codes + t, known[t], orders, number, counts + t * number * BASES);
    }
    for (int i = 0; i < number; i++) {
        int k = orders[i];
        uint64_t most = (UINT64_C(1) << 2 * k) - 1, forth = 0, back = 0;
        memset(table.slots, 0, slots * sizeof(Slot));
        for (int64_t t = 0; t < length; t++) { /* what was read of the window, before its base t */
            if (known[t] >= k) memcpy(inside + t * BASES, find(table, forth)->counts, BASES * sizeof *inside);
            if (codes[t] >= BASES) continue;
            uint64_t after = back >> 2 | (uint64_t)(3 - codes[t]) << 2 * (k - 1); /* the other strand's context, ending behind t */
            if (known[t] >= k) {
                count(table, forth, codes[t]);
                count(table, after, 3 - codes[t - k]);
            }
            forth = (forth << 2 | codes[t]) & most, back = after;
        }
        forth = 0;
        for (int64_t t = 0; t < length; t++) {
            if (known[t] >= k) {
                int32_t *all = counts + (t * number + i) * BASES, *read = inside + t * BASES, sum = 0;
                const int32_t *whole = find(table, forth)->counts;
                for (int x = 0; x < BASES; x++) sum += all[x] += read[x] - (own ? whole[x] : 0);
                float *mine = logs + t * experts * BASES;
                centre(all, k < 12 ? 1.0 : 1.0 / 16, mine + i * BASES);
                if (recent[i] >= 0) centre(read, k < 8 ? 1.0 : 1.0 / 16, mine + recent[i] * BASES);
                if (sum > 0) longest[t] = i + 1;
            }
            if (codes[t] < BASES) forth = (forth << 2 | codes[t]) & most;
        }
    }
    free(table.slots), free(counts), free(inside), free(known);
    return 0;
}

/* Mix the opinions on windows (many, length), which are read side by side, all with the same weights (orders + 1, experts).

   Weights take a step of `rate` along the gradient of the log-likelihood behind every base of all windows.
   nats, hits (many, length): cost, and 1 over the number of likeliest bases where the true one is among them. Of unknown bases
   they are 0. */
void mix(const uint8_t *codes, int64_t many, int64_t length, const float *logs, const uint8_t *longest, float *weights,
         int experts, float rate, double *nats, double *hits, float *gains) {
    for (int64_t t = 0; t < length; t++) {
        for (int64_t n = 0; n < many; n++) { /* with the weights as they were before any of these bases */
            int64_t at = n * length + t;
            const float *mine = logs + at * experts * BASES, *w = weights + longest[at] * experts;
            float score[BASES] = {0}, p[BASES], highest, total = 0, ties = 0, *gain = gains + n * experts;
            nats[at] = hits[at] = 0;
            if (codes[at] >= BASES) continue;
            for (int e = 0; e < experts; e++)
                for (int x = 0; x < BASES; x++) score[x] += w[e] * mine[e * BASES + x];
            highest = score[0];
            for (int x = 1; x < BASES; x++) highest = score[x] > highest ? score[x] : highest;
            for (int x = 0; x < BASES; x++) total += p[x] = expf(score[x] - highest), ties += score[x] == highest;
            for (int x = 0; x < BASES; x++) p[x] /= total;
            nats[at] = -log((double)p[codes[at]]);
            hits[at] = score[codes[at]] == highest ? 1 / ties : 0;
            for (int e = 0; e < experts; e++, mine += BASES)
                gain[e] = mine[codes[at]] - (mine[0] * p[0] + mine[1] * p[1] + mine[2] * p[2] + mine[3] * p[3]);
        }
        for (int64_t n = 0; n < many; n++) {
            int64_t at = n * length + t;
            if (codes[at] >= BASES) continue;
            for (int e = 0; e < experts; e++) weights[longest[at] * experts + e] += rate * gains[n * experts + e];
        }
    }
}
