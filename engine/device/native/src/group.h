// What ranks on one host exchange, over memory that they share.
//
//   seats      of each rank: the number of its newest exchange, and two buffers for what it brings
//   channels   of each pair, from the lower rank to the higher: what was sent, what was taken, and two buffers
//
// Sums and gathers.  Each rank copies its values into its buffer of the parity of the exchange's number, publishes the
// number, waits until all others have, and reads their buffers.  Two parities make a second barrier unnecessary: a rank
// writes a buffer again at exchange n + 2, when it has seen every rank publish n + 1; each did so after it had read all
// that it wanted of exchange n.  So all ranks wait for all in a gather too, though only rank 0 reads.
//
// Each rank sums for itself, element by element in the order of the ranks, so all have the same bits, always.
//
// What is longer than a buffer goes in pieces, each with a number of its own.
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <vector>

#include "clock.h"
#include "vectors.h"

namespace pl {

// Looks at a word before this rank sleeps: some microseconds, as long as it takes to be woken.  With more, ranks that
// share a processor, with each other or with somebody else, wait for one that they keep from running.
constexpr int kSpinsForRank = 200;

// How far one rank is, for others to wait for: on a cache line of its own, written by that rank alone.
class alignas(64) Progress {
 public:
  enum Came { kCame, kLate, kLeft };

  void publish(int64_t number) { put(2 * number); }
  void leave() { put(value_.load(std::memory_order_relaxed) | 1); }

  // Until it has come to `number`, or left before, or it is `until_ns`.
  Came wait(int64_t number, int64_t until_ns) {
    for (int i = 0; i < kSpinsForRank; i++) {
      const int64_t value = value_.load(std::memory_order_acquire);
      if (is_decided(value, number)) return decide(value, number);
      _mm_pause();
    }
    // Either this look at the value sees what was published, or the publisher's look at the sleepers sees this one:
    // both put before they look, in the one order of sequential consistency.
    sleepers_.fetch_add(1);
    Came came = kLate;
    for (;;) {
      const int64_t value = value_.load();
      if (is_decided(value, number)) {
        came = decide(value, number);
        break;
      }
      if (now_ns() >= until_ns) break;
      sleep(value, until_ns);
    }
    sleepers_.fetch_sub(1);
    return came;
  }

 private:
  std::atomic<int64_t> value_{0};      // twice the number, and 1 more once its rank has left
  std::atomic<uint32_t> sleepers_{0};  // a rank that is killed in its sleep stays one: that costs a call, no more
  static_assert(sizeof(std::atomic<int64_t>) == sizeof(int64_t) && std::atomic<int64_t>::is_always_lock_free);

  static bool has_come(int64_t value, int64_t number) { return value >= 2 * number; }
  static bool is_decided(int64_t value, int64_t number) { return has_come(value, number) || value % 2 == 1; }
  static Came decide(int64_t value, int64_t number) { return has_come(value, number) ? kCame : kLeft; }

  void put(int64_t value) {
    value_.store(value);
    if (sleepers_.load() > 0) syscall(SYS_futex, &value_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Unless the value has changed meanwhile, of which the system looks at the lower half.  Not FUTEX_PRIVATE_FLAG:
  // whoever wakes it is in another process.
  void sleep(int64_t value, int64_t until_ns) {
    const timespec until = {static_cast<time_t>(until_ns / 1000000000), static_cast<long>(until_ns % 1000000000)};
    syscall(SYS_futex, &value_, FUTEX_WAIT_BITSET, static_cast<uint32_t>(value), &until, nullptr,
            FUTEX_BITSET_MATCH_ANY);
  }
};

struct Seat {
  Progress progress;
  alignas(64) int64_t entered_ns[2];  // of each parity
};

struct Channel {
  Progress sent, taken;
  alignas(64) int64_t entered_ns[2];  // the sender's
};

// What is where in the memory.
struct GroupMemory {
  uint8_t* base;
  int32_t size;
  int64_t values_max;

  static int64_t stride(int64_t values_max) { return (values_max + 15) / 16 * 16; }
  static int64_t pairs(int32_t size) { return int64_t{size} * (size - 1) / 2; }
  static int64_t words(int32_t size) {
    return static_cast<int64_t>(sizeof(Seat)) * size + static_cast<int64_t>(sizeof(Channel)) * pairs(size);
  }
  static int64_t bytes(int32_t size, int64_t values_max) {
    return words(size) + 2 * (size + pairs(size)) * stride(values_max) * static_cast<int64_t>(sizeof(float));
  }
  Seat& seat(int rank) const { return reinterpret_cast<Seat*>(base)[rank]; }
  Channel& channel(int sender, int receiver) const {
    return reinterpret_cast<Channel*>(base + sizeof(Seat) * static_cast<size_t>(size))[pair(sender, receiver)];
  }
  float* brought(int rank, int64_t number) const { return buffer(rank, number); }
  float* carried(int sender, int receiver, int64_t number) const {
    return buffer(size + pair(sender, receiver), number);
  }

 private:
  static int64_t pair(int sender, int receiver) { return pairs(receiver) + sender; }
  float* buffer(int64_t index, int64_t number) const {
    return reinterpret_cast<float*>(base + words(size)) + (2 * index + number % 2) * stride(values_max);
  }
};

// One rank's way to the others.  Its functions return what `pellucid.h` says.
class Group {
 public:
  Group(const GroupMemory& memory, int rank, int64_t timeout_ns)
      : memory_(memory), rank_(rank), timeout_ns_(timeout_ns), carried_(static_cast<size_t>(memory.size)) {}
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() {
    memory_.seat(rank_).progress.leave();
    for (int other = 0; other < rank_; other++) memory_.channel(other, rank_).taken.leave();
    for (int other = rank_ + 1; other < memory_.size; other++) memory_.channel(rank_, other).sent.leave();
  }

  int32_t sum(float* values, int64_t count, int64_t* stamps) {
    const int64_t entered_ns = now_ns();
    int64_t done = 0;
    do {
      const int64_t piece = std::min(count - done, memory_.values_max);
      if (!meet(values + done, piece, entered_ns, done == 0 ? stamps : nullptr)) return lost_;
      add_up(values + done, piece);
      done += piece;
    } while (done < count);
    stamps[memory_.size] = now_ns();
    return 0;
  }

  int32_t gather(const float* values, const int64_t* counts, float* gathered, int64_t* stamps) {
    const int64_t entered_ns = now_ns(), longest = *std::max_element(counts, counts + memory_.size);
    int64_t done = 0;
    do {
      const int64_t piece = piece_of(counts[rank_], done);
      if (!meet(piece > 0 ? values + done : values, piece, entered_ns, done == 0 ? stamps : nullptr)) return lost_;
      float* to = gathered;
      for (int rank = 0; rank_ == 0 && rank < memory_.size; to += counts[rank++])
        if (done < counts[rank]) copy(to + done, memory_.brought(rank, number_), piece_of(counts[rank], done));
      done += memory_.values_max;
    } while (done < longest);
    stamps[memory_.size] = now_ns();
    return 0;
  }

  // Without waiting for the receiver, but for one that has not taken what was sent two pieces ago.
  int32_t send(int receiver, const float* values, int64_t count, int64_t* stamps) {
    const int64_t entered_ns = now_ns();
    Channel& channel = memory_.channel(rank_, receiver);
    int64_t& number = carried_[static_cast<size_t>(receiver)];
    int64_t done = 0;
    do {
      const int64_t piece = std::min(count - done, memory_.values_max);
      number++;
      if (!has_come(channel.taken, number - 2, receiver, now_ns() + timeout_ns_)) return lost_;
      copy(memory_.carried(rank_, receiver, number), values + done, piece);
      channel.entered_ns[number % 2] = entered_ns;
      channel.sent.publish(number);
      done += piece;
    } while (done < count);
    return stamp(stamps, entered_ns);
  }

  int32_t receive(int sender, float* values, int64_t count, int64_t* stamps) {
    const int64_t entered_ns = now_ns();
    Channel& channel = memory_.channel(sender, rank_);
    int64_t& number = carried_[static_cast<size_t>(sender)];
    int64_t done = 0, sent_ns = 0;
    do {
      const int64_t piece = std::min(count - done, memory_.values_max);
      number++;
      if (!has_come(channel.sent, number, sender, now_ns() + timeout_ns_)) return lost_;
      sent_ns = channel.entered_ns[number % 2];  // the same for all pieces
      copy(values + done, memory_.carried(sender, rank_, number), piece);
      channel.taken.publish(number);
      done += piece;
    } while (done < count);
    stamp(stamps, entered_ns);
    stamps[sender] = sent_ns;
    return 0;
  }

 private:
  const GroupMemory memory_;
  const int rank_;
  const int64_t timeout_ns_;
  int64_t number_ = 0;            // of the newest piece of a sum or gather; as in all ranks
  std::vector<int64_t> carried_;  // of each other rank: of the newest piece to it or from it
  int32_t lost_ = 0;

  static void copy(float* to, const float* from, int64_t count) {
    if (count > 0) std::memcpy(to, from, sizeof(float) * static_cast<size_t>(count));
  }

  int64_t piece_of(int64_t count, int64_t done) const {
    return std::min(std::max<int64_t>(count - done, 0), memory_.values_max);
  }

  bool has_come(Progress& progress, int64_t number, int rank, int64_t until_ns) {
    if (lost_ != 0) return false;
    const Progress::Came came = progress.wait(number, until_ns);
    if (came == Progress::kLate) lost_ = 1 + rank;
    if (came == Progress::kLeft) lost_ = -1 - rank;
    return came == Progress::kCame;
  }

  // Bring a piece, and wait for everybody's.  `stamps` of the first piece; null: of others.
  bool meet(const float* values, int64_t count, int64_t entered_ns, int64_t* stamps) {
    if (lost_ != 0) return false;
    number_++;
    Seat& own = memory_.seat(rank_);
    copy(memory_.brought(rank_, number_), values, count);
    own.entered_ns[number_ % 2] = entered_ns;
    own.progress.publish(number_);
    const int64_t until_ns = now_ns() + timeout_ns_;
    for (int rank = 0; rank < memory_.size; rank++) {
      Seat& seat = memory_.seat(rank);
      if (rank != rank_ && !has_come(seat.progress, number_, rank, until_ns)) return false;
      if (stamps != nullptr) stamps[rank] = seat.entered_ns[number_ % 2];
    }
    return true;
  }

  void add_up(float* values, int64_t count) const {
    const float* first = memory_.brought(0, number_);
    const int64_t step = 2 * GroupMemory::stride(memory_.values_max);  // from a rank's buffer to the next one's
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
      Floats a = load(first + i), b = load(first + i + 16);
      for (int rank = 1; rank < memory_.size; rank++) {
        const float* more = first + rank * step + i;
        a = add(a, load(more));
        b = add(b, load(more + 16));
      }
      store(values + i, a);
      store(values + i + 16, b);
    }
    for (; i < count; i++) {
      float total = first[i];
      for (int rank = 1; rank < memory_.size; rank++) total += first[rank * step + i];
      values[i] = total;
    }
  }

  int32_t stamp(int64_t* stamps, int64_t entered_ns) const {
    std::fill(stamps, stamps + memory_.size, 0);
    stamps[rank_] = entered_ns;
    stamps[memory_.size] = now_ns();
    return 0;
  }
};

}  // namespace pl
