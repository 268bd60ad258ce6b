#include "nvme/superblock.h"

#include <cstring>
#include <random>

#include "catch.h"

namespace strata::nvme {
namespace {

Superblock example(size_t records, size_t metadata_bytes, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  Superblock superblock;
  for (uint8_t& byte : superblock.store_id) byte = static_cast<uint8_t>(random());
  superblock.drive_index = 2;
  superblock.drive_count = 3;
  superblock.generation = random();
  superblock.commit_id = random();
  superblock.committed_generation = random();
  superblock.in_flux = (seed & 1) != 0;
  superblock.file_size_bytes = random();
  superblock.bytes_written_total = random();
  superblock.map_size_bytes = random();
  superblock.map_checksum = random();
  for (size_t i = 0; i < records; ++i) {
    superblock.records.push_back({random(), random(), static_cast<uint32_t>(random() % 2)});
  }
  for (size_t i = 0; i < metadata_bytes; ++i) {
    superblock.metadata.push_back(static_cast<std::byte>(random()));
  }
  return superblock;
}

std::vector<std::byte> encoded(const Superblock& superblock) {
  std::vector<std::byte> bytes(kSuperblockSpan, std::byte{0xee});
  const size_t size = encode(superblock, bytes);
  CHECK(size == encoded_bytes(superblock));
  CHECK(size % superblock.alignment_bytes == 0);
  return bytes;
}

SuperblockFault fault_of(std::span<const std::byte> bytes) {
  return decode_superblock(bytes).fault;
}

TEST_CASE("superblock: what is written is read again") {
  for (const size_t records : {size_t{0}, size_t{1}, size_t{164}, size_t{165}, kMaxRecords}) {
    for (const size_t metadata : {size_t{0}, size_t{1}, size_t{4095}, kMaxMetadataBytes}) {
      Superblock superblock = example(records, metadata, records + metadata + 1);
      for (const uint32_t alignment : {4096U, 16384U}) {
        superblock.alignment_bytes = alignment;
        const DecodedSuperblock decoded = decode_superblock(encoded(superblock));
        REQUIRE(decoded.fault == SuperblockFault::kNone);
        CHECK(decoded.superblock == superblock);
      }
    }
  }
}

TEST_CASE("superblock: the bytes are those of docs/formats.md") {
  Superblock superblock = example(2, 3);
  superblock.generation = 0x1122334455667788;
  superblock.in_flux = true;
  const std::vector<std::byte> bytes = encoded(superblock);
  const auto at = [&](size_t offset, auto value) {
    std::memcpy(&value, bytes.data() + offset, sizeof value);
    return value;
  };
  CHECK(std::memcmp(bytes.data(), "STRATASB", 8) == 0);
  CHECK(at(8, uint32_t{}) == 1);
  CHECK(at(12, uint32_t{}) == 4096);
  CHECK(at(16, uint8_t{}) == 8);
  CHECK(at(23, uint8_t{}) == 1);
  CHECK(std::memcmp(bytes.data() + 24, superblock.store_id.data(), 16) == 0);
  CHECK(at(40, uint32_t{}) == 2);
  CHECK(at(44, uint32_t{}) == 3);
  CHECK(at(48, uint64_t{}) == 0x1122334455667788);
  CHECK(at(56, uint64_t{}) == superblock.commit_id);
  CHECK(at(64, uint64_t{}) == superblock.committed_generation);
  CHECK(at(72, uint64_t{}) == superblock.file_size_bytes);
  CHECK(at(80, uint64_t{}) == superblock.bytes_written_total);
  CHECK(at(88, uint64_t{}) == superblock.map_size_bytes);
  CHECK(at(96, uint64_t{}) == superblock.map_checksum);
  CHECK(at(104, uint32_t{}) == 1);
  CHECK(at(108, uint32_t{}) == 2);
  CHECK(at(112, uint32_t{}) == 3);
  CHECK(at(116, uint32_t{}) == 4096);
  CHECK(at(128, uint64_t{}) == superblock.records[0].generation);
  CHECK(at(128 + 24 + 8, uint64_t{}) == superblock.records[1].table_checksum);
  CHECK(at(128 + 24 + 16, uint32_t{}) == superblock.records[1].slot);
  CHECK(at(128 + 48, std::byte{}) == superblock.metadata[0]);
  CHECK(at(4096 - 8, uint64_t{}) == checksum_of(std::span(bytes).first(4096 - 8)));
}

TEST_CASE("superblock: every flipped bit is noticed") {
  const Superblock superblock = example(5, 100);
  std::vector<std::byte> bytes = encoded(superblock);
  const size_t bits = encoded_bytes(superblock) * 8;
  size_t unnoticed = 0;
  for (size_t bit = 0; bit < bits; ++bit) {
    const auto mask = static_cast<std::byte>(1U << (bit % 8));
    bytes[bit / 8] ^= mask;
    if (fault_of(bytes) == SuperblockFault::kNone) ++unnoticed;
    bytes[bit / 8] ^= mask;
  }
  CHECK(unnoticed == 0);
  CHECK(fault_of(bytes) == SuperblockFault::kNone);
}

TEST_CASE("superblock: says what is wrong") {
  std::vector<std::byte> bytes = encoded(example(5, 100));
  SECTION("never written") {
    CHECK(fault_of(std::vector<std::byte>(kSuperblockSpan)) == SuperblockFault::kEmpty);
  }
  SECTION("something else") {
    bytes[0] = std::byte{'X'};
    CHECK(fault_of(bytes) == SuperblockFault::kNotAStore);
  }
  SECTION("another format") {
    bytes[8] = std::byte{7};
    CHECK(fault_of(bytes) == SuperblockFault::kOtherFormat);
    CHECK(decode_superblock(bytes).format == 7);
  }
  SECTION("the other byte order") {
    std::reverse(bytes.begin() + 16, bytes.begin() + 24);
    CHECK(fault_of(bytes) == SuperblockFault::kOtherByteOrder);
  }
  SECTION("cut short at any length") {
    for (const size_t size : {0, 1, 8, 127, 128, 4095}) {
      CHECK(fault_of(std::span(bytes).first(size)) == SuperblockFault::kDamaged);
    }
    CHECK(fault_of(std::span(bytes).first(4096)) == SuperblockFault::kNone);
  }
  SECTION("torn between two generations") {
    const std::vector<std::byte> newer = encoded(example(5, 8000, 3));
    const std::vector<std::byte> older = encoded(example(5, 8000, 4));
    for (size_t torn = 512; torn < 8192; torn += 512) {
      std::vector<std::byte> mixed = older;
      std::copy_n(newer.begin(), torn, mixed.begin());
      CHECK(fault_of(mixed) == SuperblockFault::kDamaged);
    }
  }
  SECTION("a size that makes no sense, under a right checksum of what it covers") {
    for (const uint32_t size : {0U, 8U, 135U, 300000U, 0xffffffffU}) {
      std::memcpy(bytes.data() + 12, &size, sizeof size);
      CHECK(fault_of(bytes) == SuperblockFault::kDamaged);
    }
  }
}

}  // namespace
}  // namespace strata::nvme
