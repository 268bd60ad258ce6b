#include "comm/mpi_communicator.h"

#include <fmt/format.h>
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "comm/mpi_internal.h"
#include "comm/ordered_sum.h"
#include "gpu/host/host_stream.h"

namespace strata::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTag = 1;
/// Of messages that need no memory beside their own.
constexpr size_t kMessageBytes = 16 * kMiB;
/// What a communicator may use for pieces to be summed, and the least and most of one piece.
constexpr size_t kScratchBytes = 32 * kMiB;
constexpr size_t kLeastPieceBytes = 64 * kKiB;
constexpr size_t kMostPieceBytes = kMiB;
constexpr size_t kCacheLineBytes = 64;
/// Pieces that are exchanged while the one before is summed.
constexpr size_t kPiecesInFlight = 2;

gpu::host::HostStream& host_stream(gpu::Stream& stream) {
  return static_cast<gpu::host::HostStream&>(stream);
}

std::byte* at(void* data, size_t offset_bytes) {
  return static_cast<std::byte*>(data) + offset_bytes;
}

/// Waits between looks at messages: at first it only lets others have the core, then it sleeps,
/// longer and longer.
class Patience {
 public:
  void renew() { since_ = Clock::now(); }
  void wait() {
    constexpr std::chrono::microseconds kYielding{200};
    constexpr std::chrono::microseconds kShortest{20};
    constexpr std::chrono::microseconds kLongest{200};
    const auto waited =
        std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since_);
    if (waited < kYielding) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::clamp(waited / 16, kShortest, kLongest));
    }
  }

 private:
  Clock::time_point since_ = Clock::now();
};

/// Messages under way, at most as many as room was made for.
class Messages {
 public:
  explicit Messages(size_t most) {
    requests_.reserve(most);
    expected_bytes_.reserve(most);
    indices_.resize(most);
    statuses_.resize(most);
  }

  void send(const void* data, size_t size_bytes, int to, MPI_Comm comm) {
    MPI_Request& request = add(kSent);
    check_mpi(MPI_Isend(data, static_cast<int>(size_bytes), MPI_BYTE, to, kTag, comm, &request),
              fmt::format("send {} bytes to rank {}", size_bytes, to));
  }
  void receive(void* data, size_t size_bytes, int from, MPI_Comm comm) {
    MPI_Request& request = add(size_bytes);
    check_mpi(MPI_Irecv(data, static_cast<int>(size_bytes), MPI_BYTE, from, kTag, comm, &request),
              fmt::format("receive {} bytes from rank {}", size_bytes, from));
  }

  /// Blocks until all have arrived and gone. Throws on an error and when `aborted`.
  void finish(const std::atomic<bool>& aborted) {
    size_t left = requests_.size();
    Patience patience;
    while (left > 0) {
      if (aborted) throw failure("the group of this rank has been given up");
      const size_t ended = look();
      left -= ended;
      if (ended > 0) {
        patience.renew();
      } else {
        patience.wait();
      }
    }
    requests_.clear();
    expected_bytes_.clear();
  }

  /// Lets go of what is under way. MPI may still write where it receives, when it is called.
  void drop() noexcept {
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      if (expected_bytes_[i] != kSent) static_cast<void>(MPI_Cancel(&requests_[i]));
      static_cast<void>(MPI_Request_free(&requests_[i]));
    }
    requests_.clear();
    expected_bytes_.clear();
  }

 private:
  static constexpr size_t kSent = SIZE_MAX;

  MPI_Request& add(size_t expected_bytes) {
    STRATA_CHECK(requests_.size() < statuses_.size(), "there must be room for the messages");
    expected_bytes_.push_back(expected_bytes);
    return requests_.emplace_back(MPI_REQUEST_NULL);
  }

  /// How many have ended since the last look.
  size_t look() {
    int ended = 0;
    const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &ended,
                                  indices_.data(), statuses_.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) check_mpi(code, "exchange messages");
    for (int i = 0; i < ended; ++i) {
      const MPI_Status& status = statuses_[static_cast<size_t>(i)];
      const size_t expected =
          expected_bytes_[static_cast<size_t>(indices_[static_cast<size_t>(i)])];
      if (code == MPI_ERR_IN_STATUS) {
        check_mpi(status.MPI_ERROR, expected == kSent ? std::string("send a message")
                                                      : fmt::format("receive {} bytes from rank {}",
                                                                    expected, status.MPI_SOURCE));
      }
      if (expected == kSent) continue;
      int received = 0;
      check_mpi(MPI_Get_count(&status, MPI_BYTE, &received), "ask for the size of a message");
      if (static_cast<size_t>(received) != expected) {
        throw failure(fmt::format(
            "rank {} has sent {} bytes instead of {}: the ranks call different collectives",
            status.MPI_SOURCE, received, expected));
      }
    }
    return static_cast<size_t>(std::max(ended, 0));
  }

  std::vector<MPI_Request> requests_;
  std::vector<size_t> expected_bytes_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
};

class PointToPoint final : public Communicator {
 public:
  PointToPoint(std::shared_ptr<MpiSession> session, int color, int key)
      : session_(std::move(session)) {
    check_mpi(MPI_Comm_split(MPI_COMM_WORLD, color, key, &comm_), "split the ranks into groups");
    check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "tell MPI to return errors");
    check_mpi(MPI_Comm_rank(comm_, &rank_), "ask MPI for this rank");
    check_mpi(MPI_Comm_size(comm_, &size_), "ask MPI how many ranks there are");
    const auto ranks = static_cast<size_t>(size_);
    for (auto& messages : messages_) messages = std::make_unique<Messages>(2 * ranks);
    piece_bytes_ =
        std::clamp(kScratchBytes / (kPiecesInFlight * ranks), kLeastPieceBytes, kMostPieceBytes) /
        kCacheLineBytes * kCacheLineBytes;
    inputs_.resize(ranks);
    if (size_ > 1) {
      scratch_ =
          std::make_unique_for_overwrite<std::byte[]>(kPiecesInFlight * ranks * piece_bytes_);
    }
  }

  ~PointToPoint() override {
    if (!session_->left()) static_cast<void>(MPI_Comm_free(&comm_));
  }
  PointToPoint(const PointToPoint&) = delete;
  PointToPoint& operator=(const PointToPoint&) = delete;

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }

  void all_gather_async(const void* in, void* out, size_t bytes_per_rank,
                        gpu::Stream& stream) override {
    enqueue(stream, [=, this] { all_gather(in, out, bytes_per_rank); });
  }

  void reduce_scatter_async(void* in, void* out, int64_t count_per_rank, DType dtype,
                            gpu::Stream& stream) override {
    enqueue(stream, [=, this] { reduce(in, count_per_rank * size_, dtype, out); });
  }

  void all_reduce_async(void* data, int64_t count, DType dtype, gpu::Stream& stream) override {
    enqueue(stream, [=, this] {
      const auto place = [=, this](int rank) {
        return static_cast<size_t>(block_of(count, size_, rank).first) * size_of(dtype);
      };
      reduce(data, count, dtype, at(data, place(rank_)));
      gather(data, static_cast<size_t>(count) * size_of(dtype), place);
    });
  }

  void broadcast_async(void* data, size_t size_bytes, int root, gpu::Stream& stream) override {
    STRATA_CHECK(root >= 0 && root < size_, "the root is a rank of the group");
    enqueue(stream, [=, this] { broadcast(data, size_bytes, root); });
  }

  void barrier_async(gpu::Stream& stream) override {
    enqueue(stream, [this] { barrier(); });
  }

  void abort() noexcept override {
    session_->leave();
    aborted_ = true;
  }

 private:
  template <class Work>
  void enqueue(gpu::Stream& stream, const Work& work) {
    host_stream(stream).enqueue([this, work] {
      try {
        if (aborted_) throw failure("the group of this rank has been given up");
        work();
      } catch (...) {
        session_->leave();
        for (auto& messages : messages_) messages->drop();
        throw;
      }
    });
  }

  [[nodiscard]] int peer(int distance) const noexcept { return (rank_ + distance) % size_; }

  void all_gather(const void* in, void* out, size_t bytes_per_rank) {
    const auto place = [=](int rank) { return static_cast<size_t>(rank) * bytes_per_rank; };
    if (in != at(out, place(rank_)) && bytes_per_rank > 0) {
      std::memcpy(at(out, place(rank_)), in, bytes_per_rank);
    }
    gather(out, place(size_), place);
  }

  /// Each rank's part of `data`, from place(rank) to place(rank + 1) bytes or the end, to all.
  template <class Place>
  void gather(void* data, size_t total_bytes, const Place& place) {
    const auto end = [&](int rank) { return rank + 1 < size_ ? place(rank + 1) : total_bytes; };
    const size_t most_bytes = end(0) - place(0);  // no part is larger than the first
    Messages& messages = *messages_[0];
    for (size_t done = 0; done < most_bytes; done += kMessageBytes) {
      const auto piece = [&](int rank) {
        const size_t size_bytes = end(rank) - place(rank);
        return std::min(size_bytes - std::min(size_bytes, done), kMessageBytes);
      };
      for (int distance = 1; distance < size_; ++distance) {
        const int from = peer(size_ - distance);
        if (piece(from) > 0)
          messages.receive(at(data, place(from) + done), piece(from), from, comm_);
      }
      for (int distance = 1; distance < size_ && piece(rank_) > 0; ++distance) {
        messages.send(at(data, place(rank_) + done), piece(rank_), peer(distance), comm_);
      }
      messages.finish(aborted_);
    }
  }

  /// out = this rank's block of the sum of all ranks' `data`.
  void reduce(void* data, int64_t count, DType dtype, void* out) {
    const size_t width = size_of(dtype);
    const auto piece_count = static_cast<int64_t>(piece_bytes_ / width);
    const int64_t pieces = (block_of(count, size_, 0).count + piece_count - 1) / piece_count;
    // What piece number `index` of a rank's block is.
    const auto piece_of = [=, this](int rank, int64_t index) {
      const Block block = block_of(count, size_, rank);
      const int64_t done = std::min(block.count, index * piece_count);
      return Block{.first = block.first + done, .count = std::min(piece_count, block.count - done)};
    };
    const auto received = [this](int rank, int64_t index) {
      const auto slot = static_cast<size_t>(index) % kPiecesInFlight;
      return scratch_.get() +
             (slot * static_cast<size_t>(size_) + static_cast<size_t>(rank)) * piece_bytes_;
    };
    const auto exchange = [&](int64_t index) {
      Messages& messages = *messages_[static_cast<size_t>(index) % kPiecesInFlight];
      const Block mine = piece_of(rank_, index);
      for (int distance = 1; distance < size_ && mine.count > 0; ++distance) {
        const int from = peer(size_ - distance);
        messages.receive(received(from, index), static_cast<size_t>(mine.count) * width, from,
                         comm_);
      }
      for (int distance = 1; distance < size_; ++distance) {
        const Block theirs = piece_of(peer(distance), index);
        if (theirs.count == 0) continue;
        messages.send(at(data, static_cast<size_t>(theirs.first) * width),
                      static_cast<size_t>(theirs.count) * width, peer(distance), comm_);
      }
    };

    if (pieces > 0) exchange(0);
    const int64_t first = block_of(count, size_, rank_).first;
    for (int64_t index = 0; index < pieces; ++index) {
      if (index + 1 < pieces) exchange(index + 1);
      messages_[static_cast<size_t>(index) % kPiecesInFlight]->finish(aborted_);
      const Block mine = piece_of(rank_, index);
      for (int rank = 0; rank < size_; ++rank) {
        inputs_[static_cast<size_t>(rank)] = rank == rank_
                                                 ? at(data, static_cast<size_t>(mine.first) * width)
                                                 : received(rank, index);
      }
      sum_in_order(inputs_.data(), size_, mine.count, dtype,
                   at(out, static_cast<size_t>(mine.first - first) * width));
    }
  }

  /// From each rank to the next, beginning at the root: a piece is sent on while the next arrives.
  void broadcast(void* data, size_t size_bytes, int root) {
    const int place = (rank_ - root + size_) % size_;
    Messages& messages = *messages_[0];
    for (size_t done = 0; done < size_bytes; done += kMostPieceBytes) {
      const size_t piece = std::min(kMostPieceBytes, size_bytes - done);
      if (place > 0) messages.receive(at(data, done), piece, peer(size_ - 1), comm_);
      messages.finish(aborted_);
      if (place + 1 < size_) messages.send(at(data, done), piece, peer(1), comm_);
    }
    messages.finish(aborted_);
  }

  /// Everyone knows of twice as many after each round (dissemination; Hensgen, Finkel, Manber
  /// 1988).
  void barrier() {
    for (int distance = 1; distance < size_; distance *= 2) {
      messages_[0]->receive(nullptr, 0, peer(size_ - distance), comm_);
      messages_[0]->send(nullptr, 0, peer(distance), comm_);
      messages_[0]->finish(aborted_);
    }
  }

  std::shared_ptr<MpiSession> session_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  std::atomic<bool> aborted_ = false;

  // Of the stream's thread.
  std::array<std::unique_ptr<Messages>, kPiecesInFlight> messages_;
  size_t piece_bytes_ = 0;
  std::unique_ptr<std::byte[]> scratch_;  // [kPiecesInFlight][size_][piece_bytes_]
  std::vector<const void*> inputs_;
};

}  // namespace

std::unique_ptr<Communicator> create_mpi_communicator(const std::shared_ptr<MpiSession>& session,
                                                      int color, int key) {
  return std::make_unique<PointToPoint>(session, color, key);
}

}  // namespace strata::comm
