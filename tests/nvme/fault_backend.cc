#include "nvme/fault_backend.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

namespace strata::nvme {

bool PowerSupply::draw() noexcept {
  uint64_t left = left_;
  do {
    if (left == 0) return false;
  } while (!left_.compare_exchange_weak(
      left, left == std::numeric_limits<uint64_t>::max() ? left : left - 1));
  ++transfers_;
  return true;
}

/// Passes everything on to the disk, which is shared with the test.
class FaultBackend final : public Backend {
 public:
  FaultBackend(FaultDisk& disk, size_t size_bytes) : disk_(disk) {
    info_.name = "fault";
    info_.direct = true;
    info_.alignment_bytes = FaultDisk::kSectorBytes;
    info_.size_bytes = static_cast<int64_t>(size_bytes);
  }
  [[nodiscard]] int try_submit(const Transfer& transfer) noexcept override {
    return disk_.submit(transfer);
  }
  [[nodiscard]] size_t reap(std::span<RawCompletion> completions, bool wait) noexcept override {
    return disk_.reap(completions, wait);
  }
  void wake() noexcept override { disk_.wake(); }
  [[nodiscard]] int close() noexcept override { return 0; }

 private:
  FaultDisk& disk_;
};

FaultDisk::FaultDisk(std::vector<std::byte> image, std::shared_ptr<PowerSupply> power)
    : power_(std::move(power)), visible_(std::move(image)), medium_(visible_) {}

BackendFactory FaultDisk::factory() {
  return [this](const BackendOptions&) {
    const std::lock_guard lock(mutex_);
    return std::make_unique<FaultBackend>(*this, visible_.size());
  };
}

void FaultDisk::fail(Operation operation, uint64_t first, uint64_t count, int errno_code) {
  const std::lock_guard lock(mutex_);
  faults_.push_back({operation, first, count, errno_code, 0});
}

void FaultDisk::shorten(Operation operation, uint64_t n, size_t bytes) {
  const std::lock_guard lock(mutex_);
  faults_.push_back({operation, n, 1, 0, bytes});
}

void FaultDisk::set_noise(const Noise& noise) {
  const std::lock_guard lock(mutex_);
  noise_ = noise;
  noise_random_.seed(noise.seed);
}

void FaultDisk::reorder(uint64_t seed, size_t window) {
  const std::lock_guard lock(mutex_);
  order_random_.seed(seed);
  window_ = window;
}

void FaultDisk::set_queue_depth(size_t depth) {
  const std::lock_guard lock(mutex_);
  depth_ = depth;
}

void FaultDisk::hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
}

void FaultDisk::release() {
  {
    const std::lock_guard lock(mutex_);
    held_ = false;
  }
  changed_.notify_all();
}

void FaultDisk::flip_bit(int64_t bit) {
  const std::lock_guard lock(mutex_);
  const auto at = static_cast<size_t>(bit / 8);
  const auto mask = static_cast<std::byte>(1U << (bit % 8));
  visible_.at(at) ^= mask;
  medium_.at(at) ^= mask;
}

std::vector<std::byte> FaultDisk::image() const {
  const std::lock_guard lock(mutex_);
  return visible_;
}

std::vector<Transfer> FaultDisk::history() const {
  const std::lock_guard lock(mutex_);
  return history_;
}

uint64_t FaultDisk::count(Operation operation) const {
  const std::lock_guard lock(mutex_);
  return counts_[static_cast<size_t>(operation)];
}

std::vector<std::byte> FaultDisk::power_cut(uint64_t seed, size_t sector_bytes) {
  power_->cut();
  const std::lock_guard lock(mutex_);
  std::vector<Write> writes = unsynced_;
  std::copy(unanswered_.begin(), unanswered_.end(), std::back_inserter(writes));
  for (const Pending& pending : pending_) {
    const Transfer& transfer = pending.transfer;
    if (transfer.operation != Operation::kWrite) continue;
    writes.push_back({transfer.offset_bytes, {transfer.data, transfer.data + transfer.size_bytes}});
  }
  std::vector<std::byte> image = medium_;
  for (const Write& write : writes) {
    image.resize(
        std::max(image.size(), static_cast<size_t>(write.offset_bytes) + write.data.size()));
  }
  const auto for_each_sector = [&](auto&& visit) {
    for (const Write& write : writes) {
      for (size_t done = 0; done < write.data.size();) {
        const size_t at = static_cast<size_t>(write.offset_bytes) + done;
        const size_t size = std::min(write.data.size() - done, sector_bytes - at % sector_bytes);
        visit(at, std::span(write.data).subspan(done, size));
        done += size;
      }
    }
  };
  // How many writes each sector has seen, then which of them is the last that it kept.
  std::vector<uint32_t> kept(image.size() / sector_bytes + 1);
  for_each_sector([&](size_t at, std::span<const std::byte>) { ++kept[at / sector_bytes]; });
  std::mt19937_64 random(seed);
  for (uint32_t& count : kept) {
    if (count > 0) count = static_cast<uint32_t>(random() % (count + 1));
  }
  std::vector<uint32_t> seen(kept.size());
  for_each_sector([&](size_t at, std::span<const std::byte> data) {
    const size_t sector = at / sector_bytes;
    if (++seen[sector] <= kept[sector]) std::memcpy(image.data() + at, data.data(), data.size());
  });
  return image;
}

bool FaultDisk::chance(double probability) {
  return probability > 0 && std::uniform_real_distribution<>()(noise_random_) < probability;
}

int FaultDisk::submit(const Transfer& transfer) {
  const std::lock_guard lock(mutex_);
  if (pending_.size() >= depth_) return EBUSY;
  if (chance(noise_.refused)) return EAGAIN;
  const uint64_t delay = window_ == 0 ? 0 : order_random_() % (window_ + 1);
  pending_.push_back({transfer, completed_writes_, ended_ + delay});
  history_.push_back(transfer);
  return 0;
}

size_t FaultDisk::next_pending() {
  if (window_ == 0) return 0;
  std::vector<size_t> due;
  for (size_t i = 0; i < pending_.size(); ++i) {
    if (pending_[i].due <= ended_) due.push_back(i);
  }
  // Where all wait for others to end, one of them has to go first.
  if (due.empty()) return order_random_() % pending_.size();
  return due[order_random_() % due.size()];
}

size_t FaultDisk::reap(std::span<RawCompletion> completions, bool wait) {
  std::unique_lock lock(mutex_);
  if (wait) {
    changed_.wait(lock, [&] { return woken_ || (!held_ && !pending_.empty()); });
    woken_ = false;
  }
  if (held_) return 0;
  size_t most = std::min(completions.size(), pending_.size());
  if (window_ > 0 && most > 0) most = 1 + order_random_() % most;
  for (size_t i = 0; i < most; ++i) {
    const size_t next = next_pending();
    const Pending pending = pending_[next];
    completions[i] = {pending.transfer.tag, end(pending)};
    pending_.erase(pending_.begin() + static_cast<ptrdiff_t>(next));
  }
  return most;
}

void FaultDisk::wake() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  changed_.notify_all();
}

int64_t FaultDisk::end(const Pending& pending) {
  const Transfer& transfer = pending.transfer;
  ++ended_;
  if (!power_->draw()) {
    if (transfer.operation == Operation::kWrite) {
      unanswered_.push_back(
          {transfer.offset_bytes, {transfer.data, transfer.data + transfer.size_bytes}});
    }
    return -EIO;
  }
  const uint64_t n = counts_[static_cast<size_t>(transfer.operation)]++;
  const auto address = reinterpret_cast<uintptr_t>(transfer.data);
  if ((static_cast<size_t>(transfer.offset_bytes) | transfer.size_bytes | address) % kSectorBytes !=
      0) {
    return -EINVAL;  // as direct I/O has it
  }
  size_t size = transfer.size_bytes;
  for (const Fault& fault : faults_) {
    if (fault.operation != transfer.operation || n < fault.first ||
        n - fault.first >= fault.count) {
      continue;
    }
    if (fault.errno_code != 0) return -fault.errno_code;
    size = std::min(size, fault.limit_bytes);
  }
  if (chance(noise_.interrupted)) return -EINTR;
  if (chance(noise_.again)) return -EAGAIN;
  if (chance(noise_.shortened)) {
    size = std::min(size, noise_random_() % (size / kSectorBytes + 1) * kSectorBytes);
    // A read of nothing is the end of the file.
    if (transfer.operation == Operation::kRead) {
      size = std::max(size, std::min(kSectorBytes, transfer.size_bytes));
    }
  }
  return apply(pending, size);
}

int64_t FaultDisk::apply(const Pending& pending, size_t size_bytes) {
  const Transfer& transfer = pending.transfer;
  const auto offset = static_cast<size_t>(transfer.offset_bytes);
  switch (transfer.operation) {
    case Operation::kRead: {
      if (offset >= visible_.size()) return 0;
      const size_t size = std::min(size_bytes, visible_.size() - offset);
      if (size > 0) std::memcpy(transfer.data, visible_.data() + offset, size);
      return static_cast<int64_t>(size);
    }
    case Operation::kWrite: {
      if (size_bytes == 0) return 0;
      const size_t end = offset + size_bytes;
      if (end > visible_.size()) visible_.resize(end);
      std::memcpy(visible_.data() + offset, transfer.data, size_bytes);
      unsynced_.push_back({transfer.offset_bytes, {transfer.data, transfer.data + size_bytes}});
      ++completed_writes_;
      return static_cast<int64_t>(size_bytes);
    }
    case Operation::kSync: {
      size_t durable = 0;
      while (durable_writes_ < pending.completed_writes) {
        const Write& write = unsynced_[durable++];
        const auto at = static_cast<size_t>(write.offset_bytes);
        if (at + write.data.size() > medium_.size()) medium_.resize(at + write.data.size());
        std::memcpy(medium_.data() + at, write.data.data(), write.data.size());
        ++durable_writes_;
      }
      unsynced_.erase(unsynced_.begin(), unsynced_.begin() + static_cast<ptrdiff_t>(durable));
      return 0;
    }
  }
  return -EINVAL;
}

}  // namespace strata::nvme
