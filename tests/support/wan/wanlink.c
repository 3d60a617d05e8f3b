/* wanlink - a wide-area link emulator over TUN devices, for Linux.
 *
 * Every host is one TUN device, usually in a network namespace of its own.
 * An IPv4 packet that host a sends to host b passes
 *
 *   a's uplink (rate, drop-tail queue) -> loss -> delay and jitter
 *     -> b's downlink (rate, drop-tail queue) -> b
 *
 * All stages run in computed time: a packet's departure is worked out from its
 * length and the link's rate, not from when the process happened to wake, so a
 * late wake-up delays a packet but never changes the rate.
 *
 * With segmentation offload (the default) the kernel hands over TCP packets of
 * up to 64 KiB; they are treated here as the MTU-sized packets they stand for,
 * each with its own queueing, loss and due time, and those of one such packet
 * that fall due in the same round are handed on together.
 *
 * One thread, no busy loop: it sleeps in ppoll and, under load, wakes at most
 * once a quantum. A UNIX stream socket takes commands, one a line:
 *
 *   set TARGET KEY VALUE [KEY VALUE ...]    cut TARGET    heal TARGET
 *   stats    reset    show
 *
 * TARGET is `all`, a host `a`, a direction `a:b`, or both directions `a-b`.
 * Each command is answered by one line of JSON.
 *
 * Build: gcc -std=c11 -O2 -o wanlink wanlink.c
 *
 * Copyright (c) the wanlink authors. MIT licence: permission is granted, free
 * of charge, to any person to use, copy, modify, merge, publish, distribute,
 * sublicense and sell copies of this software, provided this notice is kept in
 * all copies. The software comes "as is", without warranty of any kind; the
 * authors are not liable for any claim or damage arising from it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

typedef int64_t ns_t;
#define NEVER INT64_MAX
#define US ((ns_t)1000)
#define MS ((ns_t)1000000)
#define SEC ((ns_t)1000000000)

enum {
    MAXHOST = 32,
    MAXCLIENT = 16,
    VH = sizeof(struct virtio_net_hdr), /* precedes every packet on a TUN fd */
    MAXPKT = 65535,
    READ_BUDGET = 256, /* reads from one TUN before the others get their turn */
    MIN_QUEUE = 256 * 1024,
};

static ns_t clk(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec * SEC + ts.tv_nsec;
}

static void die(const char *fmt, ...) {
    int e = errno;
    va_list ap;
    va_start(ap, fmt);
    fputs("wanlink: ", stderr);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    if (e) fprintf(stderr, ": %s", strerror(e));
    fputc('\n', stderr);
    exit(1);
}

/* ---- packet buffers: size classes with bounded free lists -------------- */

struct buf {
    struct buf *next;
    uint32_t refs; /* packets still under way that lie in this buffer */
    uint32_t len;  /* bytes in mem: virtio header, then the IP packet */
    uint16_t ihl, hl, gso, nseg; /* IP header, all headers, segment size and count */
    uint8_t cls;
    unsigned char mem[];
};

static const uint32_t cls_size[] = {128,  256,  512,   1024,  1664,       4096,
                                    9088, 16384, 32768, 49152, VH + MAXPKT};
enum { NCLS = sizeof cls_size / sizeof *cls_size, KEEP = 8 << 20 };
static struct buf *pool[NCLS];
static uint64_t pool_idle[NCLS], mem_used, mem_cap = (uint64_t)1 << 30;

static struct buf *buf_get(uint32_t need) {
    int c = 0;
    while (cls_size[c] < need) c++;
    struct buf *b = pool[c];
    if (b) {
        pool[c] = b->next;
        pool_idle[c] -= cls_size[c];
    } else {
        if (mem_used + cls_size[c] > mem_cap || !(b = malloc(sizeof *b + cls_size[c])))
            return NULL;
        b->cls = (uint8_t)c;
    }
    mem_used += cls_size[c];
    return b;
}

static void buf_put(struct buf *b, uint32_t refs) {
    if (b->refs -= refs) return;
    int c = b->cls;
    mem_used -= cls_size[c];
    if (pool_idle[c] >= KEEP) {
        free(b);
        return;
    }
    pool_idle[c] += cls_size[c];
    b->next = pool[c];
    pool[c] = b;
}

/* ---- FIFO of packets ---------------------------------------------------- */

struct seg {
    struct buf *b;
    ns_t t;       /* in a link's queue: arrival; on a path: due time */
    uint32_t len; /* IP length of this packet */
    uint16_t idx; /* which segment of b */
    uint8_t src, dst;
};

struct ring {
    struct seg *v;
    uint32_t cap, head, n;
};

static void ring_push(struct ring *r, const struct seg *s) {
    if (r->n == r->cap) {
        uint32_t cap = r->cap ? r->cap * 2 : 64;
        struct seg *v = malloc(cap * sizeof *v);
        if (!v) die("out of memory");
        for (uint32_t k = 0; k < r->n; k++) v[k] = r->v[(r->head + k) & (r->cap - 1)];
        free(r->v);
        *r = (struct ring){v, cap, 0, r->n};
    }
    r->v[(r->head + r->n++) & (r->cap - 1)] = *s;
}

static struct seg *ring_head(struct ring *r) { return &r->v[r->head]; }

static struct seg ring_pop(struct ring *r) {
    struct seg s = r->v[r->head];
    r->head = (r->head + 1) & (r->cap - 1);
    r->n--;
    return s;
}

/* ---- hosts, links, paths ------------------------------------------------ */

struct count { /* offered = passed + drop_queue + drop_loss + drop_cut + drop_mem + queued */
    uint64_t offered, offered_b, pkts, bytes, drop_queue, drop_loss, drop_cut, drop_mem;
    uint64_t peak;
};

struct link { /* one direction of a host's access line */
    struct ring q;
    uint64_t rate; /* bit/s, 0: unlimited */
    uint64_t limit, qbytes;
    bool autoq, busy;
    ns_t fin, free_at; /* the head's end of transmission; when the line fell idle */
    double loss;
    double ge_p, ge_r, ge_bad, ge_good; /* Gilbert-Elliott, off while ge_p is 0 */
    bool in_bad;
    uint64_t rng;
    struct count c;
};

struct group { /* consecutive segments of one buffer, to be written at once */
    struct buf *b;
    uint32_t first, n, bytes;
};

struct host {
    char name[16];
    uint32_t addr;
    int fd; /* -1: the device has gone */
    bool cut, ready, wrote;
    struct link up, down;
    ns_t delay, jitter;
    struct group g;
    uint64_t unroutable, tun_errors;
};

struct path { /* direction src -> dst; negative values: as the sending host has it */
    struct ring q;
    ns_t delay, jitter, last;
    double loss;
    bool cut;
    uint64_t rng;
    ns_t jt; /* jitter: a random level j0 at jt moves in a line to j1 one period on */
    double j0, j1;
    uint64_t pkts, bytes;
};

static struct host H[MAXHOST];
static struct path P[MAXHOST][MAXHOST];  /* [src][dst] */
static ns_t due[MAXHOST][MAXHOST];       /* [dst][src]: due time of the path's head */
static int nhost;
static ns_t quantum = 100 * US, early = 50 * US, t_start, t_round;
static uint64_t rounds;
static struct { uint64_t n, over; ns_t sum, max; } late;

/* splitmix64; every link and path has a stream of its own */
static double rnd(uint64_t *s) {
    uint64_t z = (*s += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

/* The start of a stream: one for each seed, kind of stage and pair of hosts. */
static uint64_t stream(uint64_t seed, int kind, int i, int j) {
    uint64_t s = seed, key = (uint64_t)kind << 16 | (uint64_t)i << 8 | (uint64_t)j;
    rnd(&s);
    s ^= key * 0xd1342543de82ef95u;
    rnd(&s);
    return s ^ s >> 29;
}

static bool hit(uint64_t *s, double p) { return p > 0 && rnd(s) < p; }

static ns_t path_delay(int i, int j) {
    return P[i][j].delay >= 0 ? P[i][j].delay : H[i].delay;
}

/* Jitter drifts rather than jumps: its slope stays within one half, so packets
 * keep their order and the mean delay stays what was configured. */
static ns_t jitter_now(struct path *p, ns_t t, ns_t j) {
    if (j <= 0) return 0;
    ns_t period = 4 * j > 10 * MS ? 4 * j : 10 * MS;
    if (!p->jt || t >= p->jt + 2 * period) {
        p->j0 = 2 * rnd(&p->rng) - 1;
        p->j1 = 2 * rnd(&p->rng) - 1;
        p->jt = t;
    } else if (t >= p->jt + period) {
        p->j0 = p->j1;
        p->j1 = 2 * rnd(&p->rng) - 1;
        p->jt += period;
    }
    double f = (double)(t - p->jt) / (double)period;
    return (ns_t)((double)j * (p->j0 + (p->j1 - p->j0) * f));
}

/* ---- writing to a host --------------------------------------------------- */

static uint16_t rd16(const unsigned char *p) { return (uint16_t)(p[0] << 8 | p[1]); }
static uint32_t rd32(const unsigned char *p) { return (uint32_t)rd16(p) << 16 | rd16(p + 2); }
static void wr16(unsigned char *p, uint32_t v) { p[0] = (unsigned char)(v >> 8); p[1] = (unsigned char)v; }
static void wr32(unsigned char *p, uint32_t v) { wr16(p, v >> 16); wr16(p + 2, v & 0xffff); }

static uint32_t sum16(const unsigned char *p, uint32_t n) {
    uint32_t s = 0;
    for (uint32_t k = 0; k + 1 < n; k += 2) s += rd16(p + k);
    return s;
}

static uint32_t fold(uint32_t s) {
    while (s >> 16) s = (s & 0xffff) + (s >> 16);
    return s;
}

static void host_gone(struct host *h) {
    fprintf(stderr, "wanlink: host %s: its device has gone: %s\n", h->name, strerror(errno));
    close(h->fd);
    h->fd = -1;
}

/* Writes segments first .. first+n-1 of a buffer; a part of a large TCP packet
 * gets the headers that part would have had. */
static void flush_group(struct host *h) {
    struct group g = h->g;
    if (!g.n) return;
    h->g.n = 0;
    struct buf *b = g.b;
    ssize_t r = -1;
    if (h->fd < 0) {
        errno = ENODEV;
    } else if (g.n == b->nseg) {
        r = write(h->fd, b->mem, b->len);
    } else {
        unsigned char hd[VH + 120], *ip = hd + VH, *tcp = ip + b->ihl;
        uint32_t payload = b->len - VH - b->hl, off = g.first * b->gso;
        uint32_t n = g.n * b->gso < payload - off ? g.n * b->gso : payload - off;
        bool last = g.first + g.n == b->nseg;
        struct virtio_net_hdr vh = {
            .flags = VIRTIO_NET_HDR_F_NEEDS_CSUM,
            .gso_type = g.n > 1 ? VIRTIO_NET_HDR_GSO_TCPV4 : VIRTIO_NET_HDR_GSO_NONE,
            .hdr_len = b->hl,
            .gso_size = g.n > 1 ? b->gso : 0,
            .csum_start = b->ihl,
            .csum_offset = 16,
        };
        memcpy(hd, &vh, VH);
        memcpy(ip, b->mem + VH, b->hl);
        wr16(ip + 2, b->hl + n);
        wr16(ip + 4, (rd16(ip + 4) + g.first) & 0xffff);
        wr16(ip + 10, 0);
        wr16(ip + 10, ~fold(sum16(ip, b->ihl)) & 0xffff);
        wr32(tcp + 4, rd32(tcp + 4) + off);
        if (!last) tcp[13] &= (unsigned char)~0x09; /* FIN, PSH: on the last one only */
        if (g.first) tcp[13] &= 0x7f;               /* CWR: on the first one only */
        /* the pseudo-header's sum; the checksum itself is left to the kernel */
        wr16(tcp + 16, fold(sum16(ip + 12, 8) + 6 + b->hl - b->ihl + n));
        struct iovec iov[2] = {{hd, VH + b->hl}, {b->mem + VH + b->hl + off, n}};
        r = writev(h->fd, iov, 2);
    }
    if (r < 0) {
        h->tun_errors += g.n;
        if (h->fd >= 0 && (errno == EBADFD || errno == EBADF)) host_gone(h);
    } else {
        h->down.c.pkts += g.n;
        h->down.c.bytes += g.bytes;
        h->wrote = true; /* an answer may be waiting already */
    }
    buf_put(b, g.n);
}

/* ---- the stages ------------------------------------------------------------ */

static void drop(struct seg *s, uint64_t *counter) {
    ++*counter;
    buf_put(s->b, 1);
}

static void link_arrive(struct link *l, struct seg *s) {
    l->c.offered++;
    l->c.offered_b += s->len;
    if (l->qbytes + s->len > l->limit) {
        drop(s, &l->c.drop_queue);
        return;
    }
    ring_push(&l->q, s);
    l->qbytes += s->len;
    if (l->qbytes > l->c.peak) l->c.peak = l->qbytes;
}

/* Takes the next packet whose transmission ends by `upto`; *fin is that moment. */
static bool link_next(struct link *l, ns_t upto, struct seg *s, ns_t *fin) {
    if (!l->q.n) return false;
    if (!l->busy) {
        struct seg *h = ring_head(&l->q);
        ns_t begin = h->t > l->free_at ? h->t : l->free_at;
        l->fin = begin + (l->rate ? (ns_t)(((uint64_t)h->len * 8 * SEC + l->rate / 2) / l->rate) : 0);
        l->busy = true;
    }
    if (l->fin > upto) return false;
    *s = ring_pop(&l->q);
    *fin = l->free_at = l->fin;
    l->busy = false;
    l->qbytes -= s->len;
    return true;
}

static bool link_loses(struct link *l) {
    bool lost = hit(&l->rng, l->loss);
    if (l->ge_p > 0) {
        if (hit(&l->rng, l->in_bad ? l->ge_r : l->ge_p)) l->in_bad = !l->in_bad;
        lost |= hit(&l->rng, l->in_bad ? l->ge_bad : l->ge_good);
    }
    return lost;
}

static void run_up(int i, ns_t upto) {
    struct host *h = &H[i];
    struct seg s;
    ns_t fin;
    while (link_next(&h->up, upto, &s, &fin)) {
        int j = s.dst;
        struct path *p = &P[i][j];
        if (h->cut || p->cut) {
            drop(&s, &h->up.c.drop_cut);
            continue;
        }
        if (p->loss >= 0 ? hit(&p->rng, p->loss) : link_loses(&h->up)) {
            drop(&s, &h->up.c.drop_loss);
            continue;
        }
        h->up.c.pkts++;
        h->up.c.bytes += s.len;
        p->pkts++;
        p->bytes += s.len;
        ns_t d = path_delay(i, j) + jitter_now(p, fin, p->jitter >= 0 ? p->jitter : h->jitter);
        s.t = fin + (d > 0 ? d : 0);
        if (s.t < p->last) s.t = p->last; /* a path keeps its order */
        p->last = s.t;
        if (!p->q.n) due[j][i] = s.t;
        ring_push(&p->q, &s);
    }
}

static void deliver(int j, ns_t upto) {
    struct host *h = &H[j];
    struct seg s;
    ns_t fin;
    while (link_next(&h->down, upto, &s, &fin)) {
        if (h->cut) {
            drop(&s, &h->down.c.drop_cut);
            continue;
        }
        ns_t behind = t_round - fin > 0 ? t_round - fin : 0;
        late.n++;
        late.sum += behind;
        late.over += behind > MS;
        if (behind > late.max) late.max = behind;
        if (h->g.n && h->g.b == s.b && h->g.first + h->g.n == s.idx) {
            h->g.n++;
            h->g.bytes += s.len;
        } else {
            flush_group(h);
            h->g = (struct group){s.b, s.idx, 1, s.len};
        }
    }
}

/* Merges the paths to host j by due time into its downlink. */
static void run_down(int j, ns_t upto) {
    struct host *h = &H[j];
    for (;;) {
        int from = -1;
        ns_t t = upto;
        for (int i = 0; i < nhost; i++)
            if (due[j][i] <= t && (from < 0 || due[j][i] < t)) {
                from = i;
                t = due[j][i];
            }
        if (from < 0) break;
        struct path *p = &P[from][j];
        struct seg s = ring_pop(&p->q);
        due[j][from] = p->q.n ? ring_head(&p->q)->t : NEVER;
        deliver(j, t);
        if (h->cut) {
            h->down.c.offered++;
            h->down.c.offered_b += s.len;
            drop(&s, &h->down.c.drop_cut);
        } else if (link_loses(&h->down)) {
            h->down.c.offered++;
            h->down.c.offered_b += s.len;
            drop(&s, &h->down.c.drop_loss);
        } else {
            link_arrive(&h->down, &s);
        }
    }
    deliver(j, upto);
    flush_group(h);
}

/* Moves on all that is due, or will be before a wake-up later on would pay. True:
 * something was written. */
static bool pump(void) {
    bool any = false;
    t_round = clk();
    for (int i = 0; i < nhost; i++) run_up(i, t_round + early);
    for (int j = 0; j < nhost; j++) {
        run_down(j, t_round + early);
        any |= H[j].wrote;
    }
    return any;
}

static ns_t next_event(void) {
    ns_t t = NEVER;
    for (int j = 0; j < nhost; j++) {
        if (H[j].up.busy && H[j].up.fin < t) t = H[j].up.fin;
        if (H[j].down.busy && H[j].down.fin < t) t = H[j].down.fin;
        for (int i = 0; i < nhost; i++)
            if (due[j][i] < t) t = due[j][i];
    }
    return t;
}

/* ---- reading from a host ---------------------------------------------------- */

static void take(int i, const unsigned char *raw, size_t n, ns_t t) {
    struct host *h = &H[i];
    const unsigned char *ip = raw + VH;
    struct virtio_net_hdr vh;
    if (n < VH + 20u || n > VH + MAXPKT || ip[0] >> 4 != 4) {
        h->unroutable++;
        return;
    }
    uint32_t len = (uint32_t)n - VH, dst = rd32(ip + 16), ihl = (ip[0] & 15) * 4u, hl = 0, gso = 0, nseg = 1;
    int j = 0;
    while (j < nhost && H[j].addr != dst) j++;
    if (j == nhost || j == i) {
        h->unroutable++;
        return;
    }
    memcpy(&vh, raw, VH);
    if (vh.gso_type != VIRTIO_NET_HDR_GSO_NONE) {
        hl = ihl + 20 <= len ? ihl + (ip[ihl + 12] >> 4) * 4u : 0;
        if (vh.gso_type != VIRTIO_NET_HDR_GSO_TCPV4 || !vh.gso_size || ihl < 20 || hl < ihl + 20 || hl >= len) {
            h->tun_errors++;
            return;
        }
        gso = vh.gso_size;
        nseg = (len - hl + gso - 1) / gso;
    }
    struct buf *b = NULL;
    uint64_t *why = &h->up.c.drop_cut;
    if (!h->cut && !P[i][j].cut) {
        why = &h->up.c.drop_mem;
        b = buf_get((uint32_t)n);
    }
    if (!b) {
        h->up.c.offered += nseg;
        h->up.c.offered_b += len + (nseg - 1) * hl;
        *why += nseg;
        return;
    }
    memcpy(b->mem, raw, n);
    b->len = (uint32_t)n;
    b->ihl = (uint16_t)ihl;
    b->hl = (uint16_t)hl;
    b->gso = (uint16_t)gso;
    b->nseg = (uint16_t)nseg;
    b->refs = nseg;
    struct seg s = {.b = b, .t = t, .src = (uint8_t)i, .dst = (uint8_t)j};
    for (uint32_t k = 0, left = len - hl; k < nseg; k++, left -= gso) {
        s.idx = (uint16_t)k;
        s.len = hl + (nseg > 1 && left > gso ? gso : left);
        link_arrive(&h->up, &s);
    }
}

static bool read_host(int i) {
    static unsigned char raw[VH + MAXPKT + 1];
    struct host *h = &H[i];
    ns_t t = clk();
    h->ready = h->wrote = false;
    run_up(i, t); /* so that the queue is as full as it is now */
    for (int k = 0; k < READ_BUDGET; k++) {
        ssize_t n = read(h->fd, raw, sizeof raw);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN) host_gone(h);
            return k > 0;
        }
        take(i, raw, (size_t)n, t);
    }
    return true;
}

/* ---- commands ------------------------------------------------------------------ */

struct out {
    char *p;
    size_t n, cap;
};

__attribute__((format(printf, 2, 3))) static void say(struct out *o, const char *fmt, ...) {
    for (;;) {
        va_list ap;
        va_start(ap, fmt);
        int k = vsnprintf(o->p + o->n, o->cap - o->n, fmt, ap);
        va_end(ap);
        if (k >= 0 && (size_t)k < o->cap - o->n) {
            o->n += (size_t)k;
            return;
        }
        o->cap = o->cap * 2 + 4096;
        if (!(o->p = realloc(o->p, o->cap))) die("out of memory");
    }
}

struct unit {
    const char *name;
    double mul;
};
static const struct unit RATE[] = {{"bit", 1}, {"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}, {0, 0}};
static const struct unit TIME[] = {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}, {0, 0}};
static const struct unit SIZE[] = {{"b", 1}, {"k", 1024}, {"kib", 1024}, {"m", 1 << 20}, {"mib", 1 << 20},
                                   {"g", 1 << 30}, {"gib", 1 << 30}, {0, 0}};
static const struct unit PROB[] = {{"%", 0.01}, {"", 1}, {0, 0}};

/* A number with a unit; a bare 0 needs none. */
static bool quantity(const char *s, const struct unit *u, double lo, double hi, double *v) {
    char *end;
    if (!isdigit((unsigned char)*s) && *s != '.') return false;
    double x = strtod(s, &end);
    if (!isfinite(x)) return false;
    for (; u->name; u++)
        if (!strcasecmp(end, u->name)) break;
    if (!u->name && !(x == 0 && !*end)) return false;
    *v = u->name ? x * u->mul : 0;
    return *v >= lo && *v <= hi;
}

static bool opt_rate(const char *s, uint64_t *v) {
    double x;
    if (!strcmp(s, "unlimited")) s = "0";
    if (!quantity(s, RATE, 0, 4e11, &x) || (x > 0 && x < 1000)) return false;
    *v = (uint64_t)x;
    return true;
}

static void set_rate(struct link *l, uint64_t rate) {
    ns_t now = clk();
    if (l->busy && l->fin > now) /* the packet under way goes on at the new rate */
        l->fin = rate ? now + (ns_t)((double)(l->fin - now) * (double)l->rate / (double)rate) : now;
    l->rate = rate;
}

static void set_queue(struct link *l, bool autoq, double v) {
    l->autoq = autoq;
    if (!autoq) l->limit = (uint64_t)v;
}

/* An automatic queue holds rate x longest round trip, at least MIN_QUEUE. */
static void auto_queues(void) {
    for (int i = 0; i < nhost; i++) {
        ns_t rtt = 0;
        for (int j = 0; j < nhost; j++)
            if (j != i && path_delay(i, j) + path_delay(j, i) > rtt)
                rtt = path_delay(i, j) + path_delay(j, i);
        for (int k = 0; k < 2; k++) {
            struct link *l = k ? &H[i].down : &H[i].up;
            if (!l->autoq) continue;
            double bdp = (double)l->rate / 8 * (double)rtt / 1e9;
            l->limit = !l->rate ? UINT64_MAX : bdp > MIN_QUEUE ? (uint64_t)bdp : MIN_QUEUE;
        }
    }
}

static int find_host(const char *s, size_t n) {
    for (int i = 0; i < nhost; i++)
        if (strlen(H[i].name) == n && !memcmp(H[i].name, s, n)) return i;
    return -1;
}

/* Splits a target: *a = *b = -1 is all hosts, *b = -1 host a, else direction a:b. */
static const char *target(const char *s, int *a, int *b, bool *both) {
    *a = *b = -1;
    *both = false;
    if (!strcmp(s, "all")) return NULL;
    size_t n = strcspn(s, ":-");
    *a = find_host(s, n);
    if (*a < 0) return "no such host";
    if (!s[n]) return NULL;
    *both = s[n] == '-';
    *b = find_host(s + n + 1, strlen(s + n + 1));
    return *b < 0 || *b == *a ? "no such pair of hosts" : NULL;
}

static const char *set_path(struct path *p, const char *key, const char *val, bool dry) {
    bool def = !strcmp(val, "default");
    double v = -1;
    if (!strcmp(key, "delay") || !strcmp(key, "rtt") || !strcmp(key, "jitter")) {
        if (!def && !quantity(val, TIME, 0, 120e9, &v)) return "bad time (give a number and ns, us, ms or s)";
        if (dry) return NULL;
        if (*key == 'j') p->jitter = (ns_t)v;
        else p->delay = def ? -1 : (ns_t)(*key == 'r' ? v / 2 : v);
        return NULL;
    }
    if (!strcmp(key, "loss")) {
        if (!def && !quantity(val, PROB, 0, 1, &v)) return "bad loss (0..1 or 0%..100%)";
        if (!dry) p->loss = v;
        return NULL;
    }
    return "unknown key for a pair (delay, rtt, jitter, loss)";
}

static const char *set_host(struct host *h, const char *key, const char *val, bool dry) {
    double v = 0;
    uint64_t r;
    if (!strcmp(key, "rate") || !strcmp(key, "up") || !strcmp(key, "down")) {
        if (!opt_rate(val, &r)) return "bad rate (give a number and kbit, mbit or gbit; 0 is unlimited)";
        if (!dry && *key != 'd') set_rate(&h->up, r);
        if (!dry && *key != 'u') set_rate(&h->down, r);
    } else if (!strcmp(key, "queue") || !strcmp(key, "upqueue") || !strcmp(key, "downqueue")) {
        bool autoq = !strcmp(val, "auto");
        if (!autoq && !quantity(val, SIZE, 1, 4e9, &v)) return "bad queue size (auto, or a number and b, k or m)";
        if (!dry && *key != 'd') set_queue(&h->up, autoq, v);
        if (!dry && *key != 'u') set_queue(&h->down, autoq, v);
    } else if (!strcmp(key, "delay") || !strcmp(key, "rtt") || !strcmp(key, "jitter")) {
        if (!quantity(val, TIME, 0, 120e9, &v)) return "bad time (give a number and ns, us, ms or s)";
        if (!dry && *key == 'd') h->delay = (ns_t)v;
        if (!dry && *key == 'r') h->delay = (ns_t)(v / 2);
        if (!dry && *key == 'j') h->jitter = (ns_t)v;
    } else if (!strcmp(key, "loss") || !strcmp(key, "lossdown")) {
        if (!quantity(val, PROB, 0, 1, &v)) return "bad loss (0..1 or 0%..100%)";
        if (!dry) (key[4] ? &h->down : &h->up)->loss = v;
    } else if (!strcmp(key, "ge") || !strcmp(key, "gedown")) {
        /* p/r[/loss while bad[/loss while good]], or off */
        double g[4] = {0, 0, 1, 0};
        char tmp[128], *save = NULL;
        int k = 0;
        if (strcmp(val, "off")) {
            snprintf(tmp, sizeof tmp, "%s", val);
            for (char *w = strtok_r(tmp, "/", &save); w && k < 5; w = strtok_r(NULL, "/", &save), k++)
                if (k == 4 || !quantity(w, PROB, 0, 1, &g[k])) k = 5;
            if (k < 2 || k > 4 || g[0] <= 0) return "bad ge (p/r[/lossbad[/lossgood]] or off)";
        }
        if (!dry) {
            struct link *l = key[2] ? &h->down : &h->up;
            l->ge_p = g[0];
            l->ge_r = g[1];
            l->ge_bad = g[2];
            l->ge_good = g[3];
            l->in_bad = false;
        }
    } else {
        return "unknown key (rate, up, down, queue, upqueue, downqueue, delay, rtt, jitter, loss, lossdown, "
               "ge, gedown)";
    }
    return NULL;
}

static const char *cmd_set(int argc, char **argv) {
    int a, b;
    bool both;
    if (argc < 4 || argc % 2) return "usage: set TARGET KEY VALUE [KEY VALUE ...]";
    const char *e = target(argv[1], &a, &b, &both);
    if (e) return e;
    for (int dry = 1; dry >= 0; dry--) /* first check all, then change */
        for (int k = 2; k < argc; k += 2)
            for (int i = a < 0 ? 0 : a; i < (a < 0 ? nhost : a + 1); i++) {
                e = b < 0 ? set_host(&H[i], argv[k], argv[k + 1], dry)
                          : set_path(&P[i][b], argv[k], argv[k + 1], dry);
                if (!e && both) e = set_path(&P[b][a], argv[k], argv[k + 1], dry);
                if (e) return e;
            }
    auto_queues();
    return NULL;
}

static const char *cmd_cut(int argc, char **argv, bool cut) {
    int a, b;
    bool both;
    if (argc < 2) return "usage: cut|heal TARGET ...";
    for (int dry = 1; dry >= 0; dry--)
        for (int k = 1; k < argc; k++) {
            const char *e = target(argv[k], &a, &b, &both);
            if (e) return e;
            if (dry) continue;
            if (b >= 0) P[a][b].cut = cut;
            if (both) P[b][a].cut = cut;
            for (int i = 0; i < nhost && b < 0; i++) {
                if (a >= 0 && i != a) continue;
                H[i].cut = cut;
            }
            if (a < 0 && !cut) /* heal all: the directions too */
                for (int i = 0; i < nhost; i++)
                    for (int j = 0; j < nhost; j++) P[i][j].cut = false;
        }
    return NULL;
}

static void say_count(struct out *o, const char *name, const struct link *l) {
    const struct count *c = &l->c;
    say(o,
        "\"%s\":{\"offered_pkts\":%" PRIu64 ",\"offered_bytes\":%" PRIu64 ",\"pkts\":%" PRIu64 ",\"bytes\":%" PRIu64
        ",\"drop_queue\":%" PRIu64 ",\"drop_loss\":%" PRIu64 ",\"drop_cut\":%" PRIu64 ",\"drop_mem\":%" PRIu64
        ",\"queued_pkts\":%" PRIu32 ",\"queued_bytes\":%" PRIu64 ",\"queue_peak\":%" PRIu64 "}",
        name, c->offered, c->offered_b, c->pkts, c->bytes, c->drop_queue, c->drop_loss, c->drop_cut, c->drop_mem,
        l->q.n, l->qbytes, c->peak);
}

static void cmd_stats(struct out *o) {
    struct rusage ru;
    getrusage(RUSAGE_SELF, &ru);
    say(o, "{\"ok\":true,\"rounds\":%" PRIu64 ",\"uptime_s\":%.3f,\"cpu_s\":%.3f,\"memory_bytes\":%" PRIu64,
        rounds, (double)(clk() - t_start) / 1e9,
        (double)(ru.ru_utime.tv_sec + ru.ru_stime.tv_sec) + (double)(ru.ru_utime.tv_usec + ru.ru_stime.tv_usec) / 1e6,
        mem_used);
    say(o, ",\"late\":{\"pkts\":%" PRIu64 ",\"mean_us\":%.1f,\"max_us\":%.1f,\"over_1ms\":%" PRIu64 "},\"hosts\":{",
        late.n, late.n ? (double)late.sum / (double)late.n / 1e3 : 0, (double)late.max / 1e3, late.over);
    for (int i = 0; i < nhost; i++) {
        struct host *h = &H[i];
        say(o, "%s\"%s\":{\"cut\":%s,\"alive\":%s,\"unroutable\":%" PRIu64 ",\"tun_errors\":%" PRIu64 ",", i ? "," : "",
            h->name, h->cut ? "true" : "false", h->fd >= 0 ? "true" : "false", h->unroutable, h->tun_errors);
        say_count(o, "up", &h->up);
        say(o, ",");
        say_count(o, "down", &h->down);
        say(o, "}");
    }
    say(o, "},\"paths\":{");
    bool first = true;
    for (int i = 0; i < nhost; i++)
        for (int j = 0; j < nhost; j++) {
            struct path *p = &P[i][j];
            if (!p->pkts && !p->cut) continue;
            say(o, "%s\"%s:%s\":{\"cut\":%s,\"pkts\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"in_flight_pkts\":%" PRIu32 "}",
                first ? "" : ",", H[i].name, H[j].name, p->cut ? "true" : "false", p->pkts, p->bytes, p->q.n);
            first = false;
        }
    say(o, "}}");
}

static void say_link(struct out *o, const char *name, const struct link *l) {
    say(o, "\"%s\":{\"rate_bps\":%" PRIu64 ",\"queue_bytes\":", name, l->rate);
    if (l->limit == UINT64_MAX) say(o, "null");
    else say(o, "%" PRIu64, l->limit);
    say(o, ",\"loss\":%.9g", l->loss);
    if (l->ge_p > 0) say(o, ",\"ge\":[%.9g,%.9g,%.9g,%.9g]", l->ge_p, l->ge_r, l->ge_bad, l->ge_good);
    say(o, "}");
}

static void cmd_show(struct out *o) {
    say(o, "{\"ok\":true,\"quantum_us\":%.3f,\"hosts\":{", (double)quantum / 1e3);
    for (int i = 0; i < nhost; i++) {
        struct host *h = &H[i];
        say(o, "%s\"%s\":{\"cut\":%s,\"delay_ms\":%.6f,\"jitter_ms\":%.6f,", i ? "," : "", h->name,
            h->cut ? "true" : "false", (double)h->delay / 1e6, (double)h->jitter / 1e6);
        say_link(o, "up", &h->up);
        say(o, ",");
        say_link(o, "down", &h->down);
        say(o, "}");
    }
    say(o, "},\"paths\":{");
    bool first = true;
    for (int i = 0; i < nhost; i++)
        for (int j = 0; j < nhost; j++) {
            struct path *p = &P[i][j];
            if (p->delay < 0 && p->jitter < 0 && p->loss < 0 && !p->cut) continue;
            say(o, "%s\"%s:%s\":{\"cut\":%s", first ? "" : ",", H[i].name, H[j].name, p->cut ? "true" : "false");
            if (p->delay >= 0) say(o, ",\"delay_ms\":%.6f", (double)p->delay / 1e6);
            if (p->jitter >= 0) say(o, ",\"jitter_ms\":%.6f", (double)p->jitter / 1e6);
            if (p->loss >= 0) say(o, ",\"loss\":%.9g", p->loss);
            say(o, "}");
            first = false;
        }
    say(o, "}}");
}

static void cmd_reset(void) {
    memset(&late, 0, sizeof late);
    for (int i = 0; i < nhost; i++) {
        struct link *l[2] = {&H[i].up, &H[i].down};
        for (int k = 0; k < 2; k++) { /* what waits in the queue counts as offered anew */
            l[k]->c = (struct count){.offered = l[k]->q.n, .offered_b = l[k]->qbytes, .peak = l[k]->qbytes};
        }
        H[i].unroutable = H[i].tun_errors = 0;
        for (int j = 0; j < nhost; j++) P[i][j].pkts = P[i][j].bytes = 0;
    }
}

/* Runs one command line; appends the reply without its newline. False: it failed. */
static bool command(char *line, struct out *o) {
    char *argv[64], *save = NULL;
    int argc = 0;
    const char *e = NULL;
    for (char *w = strtok_r(line, " \t\r\n", &save); w && argc < 64; w = strtok_r(NULL, " \t\r\n", &save))
        argv[argc++] = w;
    if (argc == 64) e = "too many words";
    else if (!argc) e = "empty command";
    else if (!strcmp(argv[0], "set")) e = cmd_set(argc, argv);
    else if (!strcmp(argv[0], "cut")) e = cmd_cut(argc, argv, true);
    else if (!strcmp(argv[0], "heal")) e = cmd_cut(argc, argv, false);
    else if (!strcmp(argv[0], "reset")) cmd_reset();
    else if (!strcmp(argv[0], "stats")) { cmd_stats(o); return true; }
    else if (!strcmp(argv[0], "show")) { cmd_show(o); return true; }
    else e = "unknown command (set, cut, heal, stats, reset, show)";
    if (e) say(o, "{\"ok\":false,\"error\":\"%s\"}", e);
    else say(o, "{\"ok\":true}");
    return !e;
}

/* ---- the control socket ------------------------------------------------------------ */

struct client {
    int fd;
    size_t n;
    char line[8192];
};
static struct client clients[MAXCLIENT];
static int nclient, listener = -1;
static const char *sock_path, *pid_path;

static void client_close(int k) {
    close(clients[k].fd);
    nclient--;
    if (k != nclient) clients[k] = clients[nclient];
}

static void client_new(void) {
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC), sz = 2 << 20;
    if (fd < 0) return;
    if (nclient == MAXCLIENT) client_close(0);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &sz, sizeof sz); /* a whole reply fits */
    clients[nclient].fd = fd;
    clients[nclient++].n = 0;
}

/* False: the connection is done with. */
static bool client_read(struct client *c) {
    ssize_t n = recv(c->fd, c->line + c->n, sizeof c->line - 1 - c->n, 0);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    bool eof = n == 0;
    c->n += (size_t)n;
    if (eof && c->n && c->line[c->n - 1] != '\n') c->line[c->n++] = '\n';
    char *p = c->line, *nl;
    while ((nl = memchr(p, '\n', c->n - (size_t)(p - c->line)))) {
        struct out o = {0};
        *nl = 0;
        pump(); /* what is due by now goes by the old settings */
        command(p, &o);
        say(&o, "\n");
        bool sent = send(c->fd, o.p, o.n, MSG_NOSIGNAL) == (ssize_t)o.n;
        free(o.p);
        if (!sent) return false;
        p = nl + 1;
    }
    c->n -= (size_t)(p - c->line);
    memmove(c->line, p, c->n);
    return !eof && c->n < sizeof c->line - 1;
}

static void listen_on(const char *path) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    errno = 0;
    if (strlen(path) >= sizeof a.sun_path) die("%s: too long for a socket's path", path);
    strcpy(a.sun_path, path);
    unlink(path);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&a, sizeof a) || listen(listener, 16)) die("%s", path);
}

/* ---- start and main loop ---------------------------------------------------------------- */

/* NAME,ADDRESS,DEVICE,NAMESPACE-FILE; the namespace - is the one we are in. */
static void open_host(char *spec, bool offload) {
    char *save = NULL, *name = strtok_r(spec, ",", &save), *addr = strtok_r(NULL, ",", &save);
    char *dev = strtok_r(NULL, ",", &save), *ns = strtok_r(NULL, "", &save);
    struct in_addr in;
    if (!ns || strlen(name) >= sizeof H->name || strlen(dev) >= IFNAMSIZ || strpbrk(name, ":-\"\\") ||
        !strcmp(name, "all") || inet_pton(AF_INET, addr, &in) != 1 || nhost == MAXHOST ||
        find_host(name, strlen(name)) >= 0) {
        errno = 0;
        die("bad -H (NAME,ADDRESS,DEVICE,NAMESPACE-FILE), or more than %d hosts", MAXHOST);
    }
    int home = -1, there;
    if (strcmp(ns, "-")) {
        home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
        there = open(ns, O_RDONLY | O_CLOEXEC);
        if (home < 0 || there < 0 || setns(there, CLONE_NEWNET)) die("%s", ns);
        close(there);
    }
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), sz = VH;
    struct ifreq ifr = {.ifr_flags = (short)(IFF_TUN | IFF_NO_PI | IFF_VNET_HDR | IFF_TUN_EXCL)};
    strcpy(ifr.ifr_name, dev);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &ifr) || ioctl(fd, TUNSETVNETHDRSZ, &sz) ||
        ioctl(fd, TUNSETOFFLOAD, offload ? TUN_F_CSUM | TUN_F_TSO4 : 0))
        die("TUN device %s for host %s", dev, name);
    if (home >= 0) {
        if (setns(home, CLONE_NEWNET)) die("return to the own namespace");
        close(home);
    }
    struct host *h = &H[nhost++];
    strcpy(h->name, name);
    h->addr = ntohl(in.s_addr);
    h->fd = fd;
    h->up.autoq = h->down.autoq = true;
}

static volatile sig_atomic_t stop;
static void on_signal(int s) { stop = s; }

static void main_loop(ns_t end) {
    struct pollfd pf[MAXHOST + 1 + MAXCLIENT];
    sigset_t none;
    sigemptyset(&none);
    ns_t check = clk() + 5 * SEC;
    while (!stop) {
        ns_t begin = clk();
        bool busy = pump(), got = false;
        for (int i = 0; i < nhost; i++)
            if (H[i].fd >= 0 && (H[i].ready || H[i].wrote)) got |= read_host(i);
        if (got) busy |= pump();
        rounds++;

        if (begin >= end) return;
        if (begin >= check) { /* our folder was removed: nobody can reach us any more */
            if (access(sock_path, F_OK)) {
                fprintf(stderr, "wanlink: control socket removed, leaving\n");
                return;
            }
            check = begin + 5 * SEC;
        }

        /* Under load one plain sleep a round; else wait for a packet or a due time. */
        struct timespec ts = {(begin + quantum) / SEC, (begin + quantum) % SEC};
        if (busy || got) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL);

        for (int i = 0; i < nhost; i++) pf[i] = (struct pollfd){H[i].fd, POLLIN, 0};
        pf[nhost] = (struct pollfd){listener, POLLIN, 0};
        for (int k = 0; k < nclient; k++) pf[nhost + 1 + k] = (struct pollfd){clients[k].fd, POLLIN, 0};
        int nc = nclient;
        ns_t at = next_event();
        if (check < at) at = check;
        if (end < at) at = end;
        ns_t wait = busy || got ? 0 : at - early - clk();
        if (wait < 0) wait = 0;
        /* ppoll may oversleep by a thousandth, and a processor wakes slowly from a long
         * rest: get up somewhat early, and sleep the remainder in a second step */
        if (wait > MS / 2) wait -= MS / 5 + wait / 1000;
        ts = (struct timespec){wait / SEC, wait % SEC};
        if (ppoll(pf, (nfds_t)(nhost + 1 + nc), &ts, &none) < 0) {
            if (errno == EINTR) continue;
            die("ppoll");
        }
        for (int i = 0; i < nhost; i++)
            if (pf[i].revents) H[i].ready = true;
        for (int k = nc - 1; k >= 0; k--)
            if (pf[nhost + 1 + k].revents && !client_read(&clients[k])) client_close(k);
        if (pf[nhost].revents) client_new();
    }
}

static void usage(void) {
    fputs("usage: wanlink -s SOCKET -H NAME,ADDRESS,DEVICE,NAMESPACE-FILE [-H ...] [-c COMMAND ...]\n"
          "  [-p PIDFILE] [-S SEED] [-q QUANTUM] [-m MEMORY] [-g 0|1] [-r 0|1] [-t SECONDS [-x WORD ...]]\n"
          "  -c  a command, as on the socket, before the start (repeatable)\n"
          "  -q  shortest time between two rounds (default 100us)\n"
          "  -m  packet memory (default 1g)    -g  segmentation offload (default 1)\n"
          "  -r  real-time scheduling, lowest priority, where allowed (default 1)\n"
          "  -t  leave after so many seconds; with -x, then become this program (each word a -x of its own)\n"
          "Prints `ready` once the devices exist, then closes its standard output.\n",
          stderr);
    exit(2);
}

int main(int argc, char **argv) {
    char *hosts[MAXHOST], *cmds[256], *successor[16] = {NULL};
    int nh = 0, nc = 0, nx = 0, opt;
    bool offload = true, realtime = true;
    double v, ttl = 0;
    uint64_t seed = 1;
    while ((opt = getopt(argc, argv, "s:p:H:c:S:q:m:g:t:x:r:")) != -1) {
        errno = 0;
        switch (opt) {
        case 's': sock_path = optarg; break;
        case 'p': pid_path = optarg; break;
        case 'H': if (nh == MAXHOST) die("more than %d hosts", MAXHOST); hosts[nh++] = optarg; break;
        case 'c': if (nc == 256) die("too many -c"); cmds[nc++] = optarg; break;
        case 'S': seed = strtoull(optarg, NULL, 0); break;
        case 'q': if (!quantity(optarg, TIME, 0, 1e8, &v)) die("bad -q"); quantum = (ns_t)v; early = quantum / 2; break;
        case 'm': if (!quantity(optarg, SIZE, 1 << 20, 1e12, &v)) die("bad -m"); mem_cap = (uint64_t)v; break;
        case 'g': offload = atoi(optarg); break;
        case 't': ttl = atof(optarg); break;
        case 'x': if (nx == 15) die("more than 15 -x"); successor[nx++] = optarg; break;
        case 'r': realtime = atoi(optarg); break;
        default: usage();
        }
    }
    if (!sock_path || !nh || optind != argc) usage();
    if (pid_path) {
        FILE *f = fopen(pid_path, "w");
        if (!f || fprintf(f, "%d\n", (int)getpid()) < 0 || fclose(f)) die("%s", pid_path);
    }

    sigset_t block;
    sigemptyset(&block);
    const int sigs[] = {SIGTERM, SIGINT, SIGHUP};
    for (int k = 0; k < 3; k++) {
        sigaction(sigs[k], &(struct sigaction){.sa_handler = on_signal}, NULL);
        sigaddset(&block, sigs[k]);
    }
    sigprocmask(SIG_BLOCK, &block, NULL); /* let in only while ppoll waits */
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1L);
    /* being punctual matters more here than a fair share; where neither is allowed, go without */
    if (!realtime || sched_setscheduler(0, SCHED_RR, &(struct sched_param){1})) setpriority(PRIO_PROCESS, 0, -15);

    for (int k = 0; k < nh; k++) open_host(hosts[k], offload);
    t_start = clk();
    for (int i = 0; i < nhost; i++) {
        H[i].up.rng = stream(seed, 1, i, 0);
        H[i].down.rng = stream(seed, 2, i, 0);
        for (int j = 0; j < nhost; j++) {
            due[j][i] = NEVER;
            P[i][j].delay = P[i][j].jitter = -1;
            P[i][j].loss = -1;
            P[i][j].rng = stream(seed, 3, i, j);
        }
    }
    auto_queues();
    for (int k = 0; k < nc; k++) {
        struct out o = {0};
        char *line = strdup(cmds[k]);
        if (!command(line, &o)) {
            errno = 0;
            die("%s: %s", cmds[k], o.p);
        }
        free(line);
        free(o.p);
    }
    listen_on(sock_path);
    if (write(1, "ready\n", 6) != 6) die("standard output");
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (null >= 0) dup2(null, 1);

    main_loop(ttl > 0 ? t_start + (ns_t)(ttl * 1e9) : NEVER);

    struct out o = {0};
    cmd_stats(&o);
    fprintf(stderr, "%s\n", o.p);
    unlink(sock_path);
    if (!stop && nx && ttl > 0 && clk() >= t_start + (ns_t)(ttl * 1e9)) {
        sigprocmask(SIG_UNBLOCK, &block, NULL);
        sched_setscheduler(0, SCHED_OTHER, &(struct sched_param){0});
        setpriority(PRIO_PROCESS, 0, 0);
        execv(successor[0], successor);
        die("%s", successor[0]);
    }
    return 0;
}
