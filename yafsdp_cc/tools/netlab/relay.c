// Carries frames between the ports of the lab's hub: each after a delay, and some of them never.
//
//     relay DELAY_MICROSECONDS LOSS PORT...
//
// Port i (from 0) leads to the rank whose hardware address ends in i + 1; LOSS is the fraction of frames that vanish.
// The delay is one for all, so frames leave in the order in which they came and one queue holds them. It says `ready`
// when it carries. The rate is none of its business: tc's tbf is on either side.
//
// Frames come in a ring shared with the kernel, as large as it takes (a socket's buffer is not, without privileges),
// and with the kernel's offload header in front: large ones stay uncut, and a checksum that the sender left for the
// hardware to fill in stays marked so.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

enum {
    HEADER = sizeof(struct virtio_net_hdr),
    BATCH = 64,
    UNDER_WAY = 128 << 20,
    BLOCK = 1 << 20,
    BLOCKS = 16,
    LARGE = 68 << 10,  // holds any frame
    SMALL = 2 << 10,   // holds a packet: where some are to be lost, each is a frame
};

// What a frame under way is preceded by in the queue. `to` is -1 where the rest of the ring is skipped.
struct record {
    int64_t due;
    int to;
    int length;
};

struct port {
    int socket;
    unsigned char *ring;
    unsigned slot_size, next;
};

static unsigned char *queue;  // a ring of records, by time due; a record never wraps
static int64_t queue_head, queue_tail;
static struct port *ports;
static int port_count;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int is_lost(uint64_t threshold) {
    static uint64_t state = 88172645463325252ULL;  // xorshift64: the same losses in every run
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 32) < threshold;
}

static struct port open_port(const char *name, unsigned slot_size) {
    int yes = 1, version = TPACKET_V2, room = 32 << 20;
    int opened = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
    if (opened < 0) fail("relay: socket");
    if (setsockopt(opened, SOL_PACKET, PACKET_VNET_HDR, &yes, sizeof yes) < 0) fail("relay: PACKET_VNET_HDR");
    if (setsockopt(opened, SOL_PACKET, PACKET_VERSION, &version, sizeof version) < 0) fail("relay: PACKET_VERSION");
    if (setsockopt(opened, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room) < 0)
        setsockopt(opened, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);  // what one may have without privileges
    struct tpacket_req shape = {
        .tp_block_size = BLOCK,
        .tp_block_nr = BLOCKS,
        .tp_frame_size = slot_size,
        .tp_frame_nr = BLOCK / slot_size * BLOCKS,
    };
    if (setsockopt(opened, SOL_PACKET, PACKET_RX_RING, &shape, sizeof shape) < 0) fail("relay: PACKET_RX_RING");
    void *ring = mmap(NULL, BLOCK * BLOCKS, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    if (ring == MAP_FAILED) fail("relay: mmap");
    struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_IP)};
    address.sll_ifindex = if_nametoindex(name);
    if (bind(opened, (struct sockaddr *)&address, sizeof address) < 0) fail(name);
    return (struct port){.socket = opened, .ring = ring, .slot_size = slot_size};
}

static struct record *record_at(int64_t place) { return (struct record *)(queue + place % UNDER_WAY); }

static int64_t size_of(int length) { return (sizeof(struct record) + length + 15) / 16 * 16; }

// A frame for which there is no room any more is lost.
static void put(int64_t due, int to, const void *bytes, int length) {
    int64_t size = size_of(length), left = UNDER_WAY - queue_tail % UNDER_WAY;
    int64_t skipped = left < size ? left : 0;
    if (queue_tail + skipped + size - queue_head > UNDER_WAY) return;
    if (skipped) *record_at(queue_tail) = (struct record){due, -1, (int)(skipped - sizeof(struct record))};
    queue_tail += skipped;
    *record_at(queue_tail) = (struct record){due, to, length};
    memcpy(record_at(queue_tail) + 1, bytes, length);
    queue_tail += size;
}

static struct tpacket2_hdr *next_slot(const struct port *port) {
    unsigned in_block = BLOCK / port->slot_size;
    return (void *)(port->ring + port->next / in_block * BLOCK + port->next % in_block * port->slot_size);
}

static void take_in(struct port *port, int64_t delay, uint64_t loss) {
    struct tpacket2_hdr *slot = next_slot(port);
    int64_t due = now() + delay;
    while (__atomic_load_n(&slot->tp_status, __ATOMIC_ACQUIRE) & TP_STATUS_USER) {
        const unsigned char *frame = (unsigned char *)slot + slot->tp_mac;
        int to = frame[4] * 256 + frame[5] - 1;
        int is_whole = slot->tp_snaplen == slot->tp_len;
        if (is_whole && to >= 0 && to < port_count && !is_lost(loss))
            put(due, to, frame - HEADER, HEADER + slot->tp_len);
        __atomic_store_n(&slot->tp_status, TP_STATUS_KERNEL, __ATOMIC_RELEASE);
        port->next = (port->next + 1) % (BLOCK / port->slot_size * BLOCKS);
        slot = next_slot(port);
    }
}

// All frames due, by runs that leave through the same port.
static void send_due(int64_t time) {
    while (queue_head != queue_tail && record_at(queue_head)->due <= time) {
        struct mmsghdr messages[BATCH];
        struct iovec contents[BATCH];
        memset(messages, 0, sizeof messages);
        int to = record_at(queue_head)->to, count = 0;
        while (count < BATCH && queue_head != queue_tail) {
            struct record *record = record_at(queue_head);
            if (record->to != to || record->due > time) break;
            contents[count] = (struct iovec){record + 1, record->length};
            messages[count].msg_hdr.msg_iov = &contents[count];
            messages[count].msg_hdr.msg_iovlen = 1;
            queue_head += size_of(record->length);
            count++;
        }
        // A frame that the port's own queue has no room for is dropped there, as by a switch; the others still leave.
        for (int done = 0; to >= 0 && done < count;) {
            int sent = sendmmsg(ports[to].socket, messages + done, count - done, MSG_DONTWAIT);
            if (sent < 0 && errno != ENOBUFS && errno != EAGAIN) fail("relay: sendmmsg");
            done += sent > 0 ? sent : 1;
        }
    }
    if (queue_head == queue_tail) queue_head = queue_tail = 0;  // memory is touched only as far as it is needed
}

int main(int count, char **words) {
    if (count < 4) {
        fprintf(stderr, "usage: relay DELAY_MICROSECONDS LOSS PORT...\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_TIMERSLACK, 1);
    int64_t delay = (int64_t)(atof(words[1]) * 1000);
    uint64_t loss = (uint64_t)(atof(words[2]) * 4294967296.0);
    port_count = count - 3;
    ports = calloc(port_count, sizeof *ports);
    struct pollfd *waited = calloc(port_count, sizeof *waited);
    queue = malloc(UNDER_WAY);
    if (!ports || !waited || !queue) fail("relay: malloc");
    for (int i = 0; i < port_count; i++) {
        ports[i] = open_port(words[3 + i], loss ? SMALL : LARGE);
        waited[i] = (struct pollfd){.fd = ports[i].socket, .events = POLLIN};
    }
    puts("ready");
    fflush(stdout);

    for (;;) {
        int64_t time = now();
        send_due(time);
        int is_waiting = queue_head != queue_tail;
        int64_t left = is_waiting ? record_at(queue_head)->due - time : 0;
        struct timespec until = {left / 1000000000, left % 1000000000};
        if (ppoll(waited, port_count, is_waiting ? &until : NULL, NULL) < 0 && errno != EINTR) fail("relay: ppoll");
        for (int i = 0; i < port_count; i++)
            if (waited[i].revents) take_in(&ports[i], delay, loss);
    }
}
