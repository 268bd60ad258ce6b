#include "model/safetensors.h"

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/bf16.h"
#include "base/error.h"
#include "base/random.h"
#include "catch.h"
#include "temporary_directory.h"

namespace strata::model {
namespace {

namespace fs = std::filesystem;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using Json = nlohmann::json;

constexpr uint64_t kSeed = 20240611;

void write_file(const fs::path& path, std::string_view text) {
  File file = File::create(path);
  file.write_at(0, std::as_bytes(std::span(text)));
  file.close();
}

// A file of any header, true or not to the format.
std::string crafted(std::string_view header, std::string_view data) {
  const uint64_t length = header.size();
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  return text.append(header).append(data);
}

std::vector<std::byte> random_bytes(size_t count, uint64_t stream) {
  CounterRandom random(kSeed, stream);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next_below(256));
  return bytes;
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) {
    names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

int64_t bytes_of(const TensorHeader& tensor) {
  int64_t bits = bits_of(tensor.type);
  for (const int64_t size : tensor.shape) bits *= size;
  return bits / 8;
}

int64_t bytes_of(std::span<const TensorHeader> tensors) {
  int64_t bytes = 0;
  for (const TensorHeader& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

// The message of the usage error that opening `path` must end in.
template <class Reader>
std::string refusal(const fs::path& path) {
  try {
    static_cast<void>(Reader::open(path));
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kUsage);
    CHECK_THAT(error.what(), StartsWith("'" + path.parent_path().string()));
    CHECK(std::string_view(error.what()).find('\n') == std::string_view::npos);
    return error.what();
  }
  return "accepted";
}

class CraftedFile {
 public:
  std::string refusal_of(std::string_view file_text) {
    write_file(path(), file_text);
    return refusal<SafetensorsFile>(path());
  }
  std::string refusal_of(std::string_view header, size_t data_bytes) {
    return refusal_of(crafted(header, std::string(data_bytes, 'd')));
  }
  [[nodiscard]] fs::path path() const { return directory_.path() / "crafted.safetensors"; }

 private:
  TemporaryDirectory directory_;
};

const std::vector<TensorHeader>& mixed_tensors() {
  static const std::vector<TensorHeader> tensors{
      {"f64", ElementType::kF64, {3, 5}},
      {"f32", ElementType::kF32, {7}},
      {"scalar", ElementType::kF32, {}},
      {"empty", ElementType::kF32, {4, 0, 2}},
      {"bf16", ElementType::kBf16, {2, 3, 4}},
      {"f16", ElementType::kF16, {1, 9}},
      {"i64 \"quoted\" \xc3\xa9\n", ElementType::kI64, {2}},
      {"bool", ElementType::kBool, {3}},
      {"f4", ElementType::kF4, {2, 5}},
      {"f6", ElementType::kF6E2M3, {4}},
      {"last", ElementType::kU8, {1}}};
  return tensors;
}

TEST_CASE("a file of every kind of tensor comes back byte for byte") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "a.safetensors";
  const std::vector<TensorHeader>& tensors = mixed_tensors();
  const std::vector<std::byte> data = random_bytes(static_cast<size_t>(bytes_of(tensors)), 1);
  const size_t piece = GENERATE(as<size_t>{}, 1, 7, 64, 1 << 20);
  {
    SafetensorsWriter writer(path, tensors, {{"format", "pt"}, {"note", "\"x\"\n"}});
    CHECK(names_in(directory.path()) == std::vector<std::string>{"a.safetensors.partial"});
    for (size_t done = 0; done < data.size(); done += piece) {
      CHECK(writer.bytes_left() == static_cast<int64_t>(data.size() - done));
      writer.write(std::span(data).subspan(done, std::min(piece, data.size() - done)));
    }
    writer.finish();
  }
  CHECK(names_in(directory.path()) == std::vector<std::string>{"a.safetensors"});

  const SafetensorsFile file = SafetensorsFile::open(path);
  CHECK(file.metadata() == Metadata{{"format", "pt"}, {"note", "\"x\"\n"}});
  REQUIRE(file.tensors().size() == tensors.size());
  size_t offset = 0;
  for (const TensorHeader& tensor : tensors) {
    CAPTURE(tensor.name);
    const TensorInfo* info = file.find(tensor.name);
    REQUIRE(info != nullptr);
    CHECK(info->name == tensor.name);
    CHECK(info->type == tensor.type);
    CHECK(info->shape == tensor.shape);
    const auto bytes = static_cast<size_t>(bytes_of(tensor));
    REQUIRE(info->size_bytes == static_cast<int64_t>(bytes));
    CHECK(info->elements * bits_of(tensor.type) == info->size_bytes * 8);
    for (size_t begin = 0; begin <= bytes; ++begin) {
      for (const size_t end : {begin, std::min(begin + 1, bytes), bytes}) {
        std::vector<std::byte> got(end - begin);
        file.read(*info, static_cast<int64_t>(begin), got);
        CHECK(std::equal(got.begin(), got.end(),
                         data.begin() + static_cast<std::ptrdiff_t>(offset + begin)));
      }
    }
    offset += bytes;
  }
  CHECK(file.tensors().front().offset_bytes % 8 == 0);
  CHECK(file.find("none") == nullptr);
}

TEST_CASE("the header is padded to 8 bytes with spaces and holds what was asked") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "a.safetensors";
  // Names of growing length meet every padding.
  for (size_t length = 1; length <= 9; ++length) {
    const std::vector<TensorHeader> tensors{{std::string(length, 'n'), ElementType::kBf16, {3}}};
    SafetensorsWriter writer(path, tensors);
    writer.write(random_bytes(6, 2));
    writer.finish();
    const std::string text = read_text_file(path);
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, text.data(), 8);
    CHECK(header_bytes % 8 == 0);
    CHECK(text.size() == 8 + header_bytes + 6);
    const std::string header = text.substr(8, header_bytes);
    CHECK(header.front() == '{');
    const size_t last = header.find_last_not_of(' ');
    CHECK(header[last] == '}');
    CHECK(header.size() - last <= 8);
    const Json expected{
        {"__metadata__", {{"format", "pt"}}},
        {std::string(length, 'n'), {{"dtype", "BF16"}, {"shape", {3}}, {"data_offsets", {0, 6}}}}};
    CHECK(Json::parse(header) == expected);
  }
}

TEST_CASE("a file without tensors is a file") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "a.safetensors";
  SafetensorsWriter writer(path, {}, {});
  writer.finish();
  const SafetensorsFile file = SafetensorsFile::open(path);
  CHECK(file.tensors().empty());
  CHECK(file.metadata().empty());
}

TEST_CASE("a writer takes exactly the bytes it announced and cleans up after itself") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "a.safetensors";
  const std::vector<TensorHeader> tensors{{"a", ElementType::kF32, {2}},
                                          {"b", ElementType::kF32, {2}}};
  write_file(path, "an older file");
  {
    SafetensorsWriter writer(path, tensors);
    writer.write(random_bytes(15, 3));
    CHECK_THROWS_WITH(writer.finish(), Contains("1 bytes of tensor data never came"));
    CHECK_THROWS_WITH(writer.write(random_bytes(2, 3)), Contains("room for 1 more bytes"));
    CHECK(writer.bytes_left() == 1);
    SafetensorsWriter moved = std::move(writer);
    CHECK(moved.bytes_left() == 1);
  }
  CHECK(names_in(directory.path()) == std::vector<std::string>{"a.safetensors"});
  CHECK(read_text_file(path) == "an older file");

  const auto refused = [&](const std::vector<TensorHeader>& list) {
    try {
      SafetensorsWriter writer(path, list);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kUsage);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const int64_t huge = int64_t{1} << 40;
  CHECK_THAT(refused({tensors[0], tensors[0]}), Contains("tensor 'a' is to be written twice"));
  CHECK_THAT(refused({{"a", ElementType::kF32, {huge, huge}}}), Contains("'a' cannot be written"));
  CHECK_THAT(refused({{"a", ElementType::kF32, {-1}}}), Contains("'a' cannot be written"));
  CHECK_THAT(refused({{"a", ElementType::kF4, {3}}}), Contains("'a' cannot be written as F4"));
  CHECK_THAT(refused({{"__metadata__", ElementType::kF32, {1}}}), Contains("cannot be written"));
  CHECK_THAT(refused({{"a", ElementType::kU8, {INT64_MAX / 8}},
                      {"b", ElementType::kU8, {INT64_MAX / 8}},
                      {"c", ElementType::kU8, {INT64_MAX / 8}},
                      {"d", ElementType::kU8, {INT64_MAX / 8}},
                      {"e", ElementType::kU8, {INT64_MAX / 8}},
                      {"f", ElementType::kU8, {INT64_MAX / 8}},
                      {"g", ElementType::kU8, {INT64_MAX / 8}},
                      {"h", ElementType::kU8, {INT64_MAX / 8}},
                      {"i", ElementType::kU8, {INT64_MAX / 8}}}),
             Contains("larger than any file"));
  CHECK(names_in(directory.path()) == std::vector<std::string>{"a.safetensors"});
}

// A file size limit stands for the full disk: both are found by reserving space.
TEST_CASE("a disk too small is found before data is written, and nothing is left") {
  const TemporaryDirectory directory;
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1 << 20, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  std::string message = "no error";
  try {
    const std::vector<TensorHeader> tensors{{"a", ElementType::kF32, {1 << 16}},
                                            {"b", ElementType::kF32, {1 << 18}}};
    const CheckpointWriter writer(directory.path(), tensors, 1 << 18);
  } catch (const IoError& error) {
    message = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  CHECK_THAT(message, Contains("cannot reserve space for"));
  CHECK_THAT(message, Contains("model-00002-of-00002.safetensors.partial"));
  CHECK(names_in(directory.path()).empty());
}

TEST_CASE("half precision becomes float exactly") {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float got = half_to_float(static_cast<uint16_t>(bits));
    const int exponent = static_cast<int>(bits >> 10 & 0x1f);
    const auto mantissa = static_cast<double>(bits & 0x3ff);
    const bool negative = (bits & 0x8000) != 0;
    bool right = std::signbit(got) == negative;
    if (exponent == 31) {
      right = right && (mantissa == 0 ? std::isinf(got) : std::isnan(got));
    } else {
      const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24)
                                             : std::ldexp(1 + mantissa / 1024, exponent - 15);
      right = right && static_cast<double>(std::fabs(got)) == magnitude;
    }
    if (!right) FAIL("half " << bits << " became " << got);
  }
}

TEST_CASE("elements are read as floats in any range") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "a.safetensors";
  // Pieces are 64 KiB: 8192 doubles, 32768 halves.
  const auto elements = GENERATE(as<int64_t>{}, 0, 1, 8191, 8192, 8193, 32767, 32768, 32769, 70000);
  const auto count = static_cast<size_t>(elements);
  CounterRandom random(kSeed, 4);
  std::vector<double> doubles(count);
  std::vector<float> floats(count);
  std::vector<Bf16> bf16s(count);
  std::vector<uint16_t> halves(count);
  for (size_t i = 0; i < count; ++i) {
    doubles[i] = random.next_normal();
    floats[i] = static_cast<float>(random.next_normal());
    bf16s[i] = {static_cast<uint16_t>(random.next_below(0x7f80))};
    halves[i] = static_cast<uint16_t>(random.next_below(0x7c00));
  }
  const std::vector<TensorHeader> tensors{{"f64", ElementType::kF64, {elements}},
                                          {"f32", ElementType::kF32, {elements}},
                                          {"bf16", ElementType::kBf16, {elements}},
                                          {"f16", ElementType::kF16, {elements}},
                                          {"i32", ElementType::kI32, {1}}};
  SafetensorsWriter writer(path, tensors);
  writer.write(std::as_bytes(std::span(doubles)));
  writer.write(std::as_bytes(std::span(floats)));
  writer.write(std::as_bytes(std::span(bf16s)));
  writer.write(std::as_bytes(std::span(halves)));
  writer.write(random_bytes(4, 5));
  writer.finish();

  const CheckpointReader reader = CheckpointReader::open(path);
  const auto expected = [&](std::string_view name, size_t i) {
    if (name == "f64") return static_cast<float>(doubles[i]);
    if (name == "f32") return floats[i];
    return name == "bf16" ? to_float(bf16s[i]) : half_to_float(halves[i]);
  };
  for (const char* name : {"f64", "f32", "bf16", "f16"}) {
    CAPTURE(name, elements);
    for (const size_t begin : {size_t{0}, std::min<size_t>(count, 1), count / 2, count}) {
      std::vector<float> got(count - begin + 1, -7.5F);
      reader.read_floats(name, static_cast<int64_t>(begin), std::span(got).first(count - begin));
      size_t wrong = 0;
      for (size_t i = begin; i < count; ++i) {
        wrong +=
            std::bit_cast<uint32_t>(got[i - begin]) != std::bit_cast<uint32_t>(expected(name, i));
      }
      CHECK(wrong == 0);
      CHECK(got.back() == -7.5F);
    }
  }
  std::array<float, 1> one{};
  CHECK_THROWS_WITH(reader.read_floats("i32", 0, one),
                    Contains("tensor 'i32' is of type I32, and weights must be BF16"));
}

TEST_CASE("files that are cut short or no safetensors are refused") {
  CraftedFile file;
  for (size_t length = 0; length < 8; ++length) {
    CHECK_THAT(file.refusal_of(std::string(length, '\0')), Contains("too short"));
  }
  CHECK_THAT(file.refusal_of("", 0), Contains("not a JSON object"));
  CHECK_THAT(file.refusal_of(crafted(std::string(16, ' '), "").substr(0, 23)),
             Contains("its header takes 16 bytes, and only 15 follow"));
  std::string text = crafted("{}", "");
  for (const uint64_t length : {uint64_t{100'000'001}, uint64_t{1} << 63, UINT64_MAX}) {
    std::memcpy(text.data(), &length, 8);
    CHECK_THAT(file.refusal_of(text), Contains("a header of " + std::to_string(length) + " bytes"));
  }
  const uint64_t allowed = 100'000'000;
  std::memcpy(text.data(), &allowed, 8);
  CHECK_THAT(file.refusal_of(text), Contains("is cut short"));
  CHECK(refusal<SafetensorsFile>(file.path()).find("crafted.safetensors'") != std::string::npos);
  CHECK_THROWS_AS(SafetensorsFile::open(file.path().parent_path() / "none"), IoError);
}

TEST_CASE("headers that are no JSON object of tensors are refused") {
  CraftedFile file;
  CHECK(file.refusal_of("{}", 0) == "accepted");
  CHECK(file.refusal_of("{}      ", 0) == "accepted");
  for (const char* header : {"[]", "3", "null", "\"{}\"", " {}", "\xef\xbb\xbf{}"}) {
    CHECK_THAT(file.refusal_of(header, 0), Contains("not a JSON object"));
  }
  for (const char* header :
       {"{", "{}x", "{\"a\"}", "{\"a\":}", "{\"\xff\":{}}", "{'a':{}}", "{}{}"}) {
    CHECK_THAT(file.refusal_of(header, 0), Contains("not JSON at its byte"));
  }
  CHECK_THAT(file.refusal_of(std::string("{}\0\0", 4), 0), Contains("not JSON at its byte"));
  for (const char* value : {"3", "-3", "1.5", "null", "true", "\"F32\"", "[]"}) {
    CHECK_THAT(file.refusal_of("{\"a\":" + std::string(value) + "}", 0),
               Contains("where the header must describe 'a'"));
  }
  CHECK_THAT(file.refusal_of(R"({"a":{"shape":)" + std::string(500000, '['), 0),
             Contains("an array"));
}

TEST_CASE("metadata must be strings by name") {
  CraftedFile file;
  CHECK(file.refusal_of(R"({"__metadata__":{}})", 0) == "accepted");
  CHECK(file.refusal_of(R"({"__metadata__":{"a":"1","b":""}})", 0) == "accepted");
  CHECK(SafetensorsFile::open(file.path()).metadata() == Metadata{{"a", "1"}, {"b", ""}});
  for (const char* value : {"3", "-3", "1.5", "null", "true", "{}", "[]"}) {
    CHECK_THAT(file.refusal_of("{\"__metadata__\":{\"k\":" + std::string(value) + "}}", 0),
               Contains("for 'k' in __metadata__"));
  }
  CHECK_THAT(file.refusal_of(R"({"__metadata__":{"k":"1","k":"1"}})", 0), Contains("'k' twice"));
  CHECK_THAT(file.refusal_of(R"({"__metadata__":3})", 0), Contains("'__metadata__'"));
  CHECK_THAT(file.refusal_of(R"({"__metadata__":{},"__metadata__":{}})", 0), Contains("twice"));
}

// A header of one tensor 'a' with the given fields.
std::string one_tensor(const std::string& fields) { return "{\"a\":{" + fields + "}}"; }

std::string one_tensor(const std::string& type, const std::string& shape,
                       const std::string& offsets) {
  return one_tensor("\"dtype\":\"" + type + "\",\"shape\":" + shape +
                    ",\"data_offsets\":" + offsets);
}

TEST_CASE("tensor descriptions with a fault are refused, naming the tensor") {
  CraftedFile file;
  const auto refused = [&](const std::string& header, size_t data_bytes = 8) {
    const std::string message = file.refusal_of(header, data_bytes);
    if (message != "accepted") CHECK_THAT(message, Contains(": tensor 'a' "));
    return message;
  };
  REQUIRE(refused(one_tensor("F32", "[2]", "[0,8]")) == "accepted");
  REQUIRE(refused(one_tensor("F64", "[]", "[0,8]")) == "accepted");
  REQUIRE(refused(one_tensor("F4", "[2,8]", "[0,8]")) == "accepted");
  REQUIRE(refused(one_tensor("F32", "[0,9]", "[0,0]"), 0) == "accepted");

  SECTION("fields") {
    CHECK_THAT(refused(one_tensor("")), Contains("has no dtype"));
    CHECK_THAT(refused(one_tensor(R"("dtype":"F32","data_offsets":[0,8])")), Contains("no shape"));
    CHECK_THAT(refused(one_tensor(R"("dtype":"F32","shape":[2])")), Contains("no data_offsets"));
    CHECK_THAT(refused(one_tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1)")),
               Contains("unknown field 'x'"));
    CHECK_THAT(refused(one_tensor(R"("dtype":"F32","dtype":"F32")")), Contains("dtype twice"));
    CHECK_THAT(refused(one_tensor(R"("shape":[2],"shape":[2])")), Contains("shape twice"));
    CHECK_THAT(refused(one_tensor(R"("data_offsets":[],"data_offsets":[])")), Contains("twice"));
    for (const char* value : {"3", "null", "true", "{}", "[]", "1.5", "-1"}) {
      CHECK_THAT(refused(one_tensor("\"dtype\":" + std::string(value))), Contains("in its dtype"));
    }
    for (const char* value : {"3", "null", "true", "{}", "\"F32\"", "[[]]", "[-1]", "[1.0]",
                              "[null]", "[{}]", "[\"1\"]", "[1e3]", "[99999999999999999999]"}) {
      CHECK_THAT(refused(one_tensor("\"shape\":" + std::string(value))), Contains("in its shape"));
      CHECK_THAT(refused(one_tensor("\"data_offsets\":" + std::string(value))),
                 Contains("in its data_offsets"));
    }
  }
  SECTION("types") {
    for (const char* type : {"", "f32", "F128", "BFLOAT16", "F32 "}) {
      CHECK_THAT(refused(one_tensor(type, "[2]", "[0,8]")),
                 Contains("unknown type '" + std::string(type) + "'"));
    }
  }
  SECTION("shapes") {
    CHECK_THAT(refused(one_tensor("F32", "[18446744073709551615]", "[0,8]")),
               Contains("impossible size or offset 18446744073709551615"));
    for (const char* shape :
         {"[4294967296,4294967296]", "[9223372036854775807]",
          "[9223372036854775807,9223372036854775807,0]", "[4611686018427387904,4]"}) {
      CHECK_THAT(refused(one_tensor("F32", shape, "[0,8]")), Contains("no file could hold that"));
    }
    CHECK_THAT(refused(one_tensor("F4", "[15]", "[0,8]")), Contains("no file could hold that"));
    CHECK_THAT(refused(one_tensor("F32", "[3]", "[0,8]")),
               Contains("takes 8 bytes in the file, and 12 as F32 of shape [3]"));
    CHECK_THAT(refused(one_tensor("BF16", "[2]", "[0,8]")), Contains("and 4 as BF16"));
    CHECK_THAT(refused(one_tensor("F32", "[2,0]", "[0,8]")), Contains("and 0 as F32"));
  }
  SECTION("ranges") {
    CHECK_THAT(refused(one_tensor("F32", "[2]", "[0]")), Contains("1 data_offsets"));
    CHECK_THAT(refused(one_tensor("F32", "[2]", "[0,8,8]")), Contains("3 data_offsets"));
    CHECK_THAT(refused(one_tensor("F32", "[2]", "[8,0]")),
               Contains("begins at byte 8 and ends at 0"));
    CHECK_THAT(refused(one_tensor("F32", "[2]", "[0,8]"), 7),
               Contains("ends at byte 8 of the data, and the file has 7"));
    CHECK_THAT(refused(one_tensor("U8", "[9223372036854775807]", "[0,9223372036854775807]")),
               Contains("the file has 8"));
    CHECK_THAT(refused(one_tensor("F32", "[2]", "[18446744073709551608,8]")),
               Contains("impossible size or offset"));
    CHECK_THAT(refused(one_tensor("F32", "[1]", "[4,8]")),
               Contains("the 4 bytes before it belong to no tensor"));
  }
}

TEST_CASE("tensors must cover the data once") {
  CraftedFile file;
  const auto tensor = [](const std::string& name, int begin, int end) {
    return "\"" + name + R"(":{"dtype":"U8","shape":[)" + std::to_string(end - begin) +
           R"(],"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(end) + "]}";
  };
  const auto refused = [&](const std::string& first, const std::string& second) {
    return file.refusal_of("{" + first + "," + second + "}", 8);
  };
  CHECK(refused(tensor("a", 0, 4), tensor("b", 4, 8)) == "accepted");
  CHECK(refused(tensor("a", 4, 8), tensor("b", 0, 4)) == "accepted");
  CHECK(SafetensorsFile::open(file.path()).tensors()[0].name == "b");
  CHECK(refused(tensor("a", 0, 8), tensor("b", 0, 0)) == "accepted");
  CHECK(refused(tensor("a", 0, 8), tensor("b", 8, 8)) == "accepted");
  CHECK_THAT(refused(tensor("a", 0, 5), tensor("b", 4, 8)), Contains("'b' overlaps tensor 'a'"));
  CHECK_THAT(refused(tensor("a", 0, 8), tensor("b", 0, 8)), Contains("overlaps tensor"));
  CHECK_THAT(refused(tensor("a", 0, 8), tensor("b", 2, 4)), Contains("'b' overlaps tensor 'a'"));
  CHECK_THAT(refused(tensor("a", 0, 8), tensor("b", 4, 4)), Contains("'b' overlaps tensor 'a'"));
  CHECK_THAT(refused(tensor("a", 0, 3), tensor("b", 4, 8)),
             Contains("'b' begins at byte 4 of the data, and the 1 bytes before it"));
  CHECK_THAT(refused(tensor("a", 0, 4), tensor("b", 4, 6)), Contains("has 2 bytes at its end"));
  CHECK_THAT(refused(tensor("a", 0, 4), tensor("a", 4, 8)), Contains("'a' is in the header twice"));
  CHECK_THAT(file.refusal_of("{}", 8), Contains("has 8 bytes at its end that belong to no tensor"));
}

TEST_CASE("names out of a file are shown on one line and cut") {
  CraftedFile file;
  CHECK_THAT(file.refusal_of("{\"evil\\nname\\u001b\":{\"x\":1}}", 0), Contains("'evil?name?'"));
  CHECK(file.refusal_of("{\"" + std::string(100000, 'n') + "\":{}}", 0).size() < 400);
}

TEST_CASE("random damage to a file is an error or a file, never a crash") {
  const TemporaryDirectory directory;
  const fs::path good_path = directory.path() / "good.safetensors";
  const fs::path path = directory.path() / "bad.safetensors";
  SafetensorsWriter writer(good_path, mixed_tensors());
  writer.write(random_bytes(static_cast<size_t>(bytes_of(mixed_tensors())), 6));
  writer.finish();
  const std::string good = read_text_file(good_path);
  const size_t header_end = good.rfind('}') + 1;

  CounterRandom random(kSeed, 7);
  int refused = 0;
  int accepted = 0;
  for (int round = 0; round < 2000; ++round) {
    std::string bad = good;
    const uint64_t flips = 1 + random.next_below(4);
    for (uint64_t i = 0; i < flips; ++i) {
      // Half of the damage in a field that means something: digits become other digits.
      const size_t at = random.next_below(header_end);
      const bool digit = bad[at] >= '0' && bad[at] <= '9' && random.next_below(2) == 0;
      bad[at] = digit ? static_cast<char>('0' + random.next_below(10))
                      : static_cast<char>(bad[at] ^ static_cast<char>(1U << random.next_below(8)));
    }
    if (random.next_below(4) == 0) bad.resize(random.next_below(bad.size()));
    write_file(path, bad);
    CAPTURE(kSeed, round);
    try {
      const SafetensorsFile file = SafetensorsFile::open(path);
      for (const TensorInfo& tensor : file.tensors()) {
        std::vector<std::byte> bytes(static_cast<size_t>(tensor.size_bytes));
        file.read(tensor, 0, bytes);
        if (!is_weight_type(tensor.type)) continue;
        std::vector<float> floats(static_cast<size_t>(tensor.elements));
        file.read_floats(tensor, 0, floats);
      }
      ++accepted;
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kUsage);
      ++refused;
    }
  }
  // Damage inside names and padding may pass.
  CHECK(refused > 1000);
  CHECK(accepted > 50);
}

// A checkpoint with its data, written in pieces of `piece` bytes.
struct Checkpoint {
  std::vector<TensorHeader> tensors;
  std::vector<std::byte> data;

  void write(const fs::path& directory, int64_t max_shard_bytes, size_t piece) const {
    CheckpointWriter writer(directory, tensors, max_shard_bytes);
    for (size_t done = 0; done < data.size(); done += piece) {
      writer.write(std::span(data).subspan(done, std::min(piece, data.size() - done)));
    }
    writer.finish();
  }

  void check(const fs::path& directory) const {
    const CheckpointReader reader = CheckpointReader::open(directory);
    CHECK(reader.names().size() == tensors.size());
    size_t offset = 0;
    for (const TensorHeader& tensor : tensors) {
      CAPTURE(tensor.name);
      REQUIRE(reader.contains(tensor.name));
      CHECK(reader.tensor(tensor.name).shape == tensor.shape);
      std::vector<std::byte> got(static_cast<size_t>(bytes_of(tensor)));
      reader.read(tensor.name, 0, got);
      CHECK(std::equal(got.begin(), got.end(), data.begin() + static_cast<std::ptrdiff_t>(offset)));
      offset += got.size();
    }
  }
};

Checkpoint checkpoint_of(const std::vector<int64_t>& sizes_bytes, uint64_t stream) {
  Checkpoint checkpoint;
  for (size_t i = 0; i < sizes_bytes.size(); ++i) {
    checkpoint.tensors.push_back(
        {"layer." + std::to_string(i), ElementType::kBf16, {sizes_bytes[i] / 2}});
  }
  checkpoint.data = random_bytes(static_cast<size_t>(bytes_of(checkpoint.tensors)), stream);
  return checkpoint;
}

TEST_CASE("a checkpoint that fits in one shard is one file") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "deep" / "er";
  const Checkpoint checkpoint = checkpoint_of({10, 20, 30}, 8);
  checkpoint.write(path, 60, 7);
  CHECK(names_in(path) == std::vector<std::string>{"model.safetensors"});
  checkpoint.check(path);
  checkpoint.check(path / "model.safetensors");
}

TEST_CASE("a larger checkpoint is shards and an index, as Hugging Face writes them") {
  const TemporaryDirectory directory;
  const size_t piece = GENERATE(as<size_t>{}, 1, 9, 1000);
  // Shards of 40: {10, 30}, {2}, {50, which has its own}, {0, 40}, {4}.
  const Checkpoint checkpoint = checkpoint_of({10, 30, 2, 50, 0, 40, 4}, 9);
  checkpoint.write(directory.path(), 40, piece);
  std::vector<std::string> expected;
  for (int i = 1; i <= 5; ++i) {
    expected.push_back("model-0000" + std::to_string(i) + "-of-00005.safetensors");
  }
  expected.emplace_back("model.safetensors.index.json");
  CHECK(names_in(directory.path()) == expected);
  checkpoint.check(directory.path());

  const std::string text = read_text_file(directory.path() / "model.safetensors.index.json");
  const Json index = Json::parse(text);
  CHECK(index == Json{{"metadata", {{"total_size", 136}}},
                      {"weight_map",
                       {{"layer.0", expected[0]},
                        {"layer.1", expected[0]},
                        {"layer.2", expected[1]},
                        {"layer.3", expected[2]},
                        {"layer.4", expected[3]},
                        {"layer.5", expected[3]},
                        {"layer.6", expected[4]}}}});
  CHECK(text.back() == '\n');
}

TEST_CASE("a checkpoint replaces the one before it whole") {
  const TemporaryDirectory directory;
  const fs::path& path = directory.path();
  write_file(path / "config.json", "{}");
  write_file(path / "model-extra.safetensors", "not ours");
  const Checkpoint large = checkpoint_of({40, 40, 40}, 10);
  const Checkpoint small = checkpoint_of({20, 20}, 11);
  large.write(path, 40, 16);
  CHECK(names_in(path).size() == 2 + 4);
  small.write(path, 40, 16);
  CHECK(names_in(path) ==
        std::vector<std::string>{"config.json", "model-extra.safetensors", "model.safetensors"});
  small.check(path);
  write_file(path / "model-00002-of-00009.safetensors.partial", "of a killed run");
  large.write(path, 40, 16);
  CHECK(names_in(path).size() == 2 + 4);
  large.check(path);

  // One that is given up leaves the earlier one as it is.
  const std::vector<std::string> before = names_in(path);
  {
    CheckpointWriter writer(path, small.tensors, 20);
    writer.write(std::span(small.data).first(39));
    CHECK_THROWS_WITH(writer.finish(), Contains("model-00002-of-00002"));
    CHECK_THROWS_WITH(writer.write(small.data), Contains("39 bytes more came"));
  }
  CHECK(names_in(path) == before);
  large.check(path);
}

TEST_CASE("checkpoints that cannot be are refused before anything is created") {
  const TemporaryDirectory directory;
  const auto refused = [&](const std::vector<TensorHeader>& tensors, int64_t max_shard_bytes) {
    try {
      const CheckpointWriter writer(directory.path(), tensors, max_shard_bytes);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kUsage);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const TensorHeader a{"a", ElementType::kF32, {10}};
  CHECK_THAT(refused({a}, 0), Contains("shards of 0 bytes"));
  CHECK_THAT(refused({a, a}, 1000), Contains("'a' is to be written twice"));
  CHECK_THAT(refused({a, a}, 40), Contains("'a' is to be written twice"));
  CHECK_THAT(refused({{"a", ElementType::kF32, {INT64_MAX}}}, 40), Contains("'a' cannot be"));
  CHECK(names_in(directory.path()).empty());
}

TEST_CASE("checkpoints with a part missing are refused") {
  const TemporaryDirectory directory;
  const fs::path& path = directory.path();
  const fs::path index = path / "model.safetensors.index.json";
  const auto refused = [&] { return refusal<CheckpointReader>(path / ""); };
  CHECK_THAT(refusal<CheckpointReader>(path / "none"), Contains("none' does not exist"));
  CHECK_THAT(refused(), Contains("holds no weights: neither model.safetensors nor"));

  const Checkpoint checkpoint = checkpoint_of({40, 40, 40}, 12);
  checkpoint.write(path, 40, 16);
  const std::string good = read_text_file(index);
  const CheckpointReader reader = CheckpointReader::open(path);
  CHECK_FALSE(reader.contains("layer.9"));
  CHECK_THROWS_WITH(reader.tensor("layer.9"), Contains(": tensor 'layer.9' is missing"));
  std::array<float, 1> one{};
  CHECK_THROWS_WITH(reader.read_floats("layer.9", 0, one), Contains("'layer.9' is missing"));

  SECTION("a shard") {
    fs::remove(path / "model-00002-of-00003.safetensors");
    CHECK_THAT(refused(), Contains("'layer.1' is placed in 'model-00002-of-00003.safetensors', "
                                   "which does not exist"));
  }
  SECTION("a tensor of a shard") {
    fs::copy_file(path / "model-00001-of-00003.safetensors",
                  path / "model-00002-of-00003.safetensors", fs::copy_options::overwrite_existing);
    CHECK_THAT(refused(), Contains("'layer.1' is placed in 'model-00002-of-00003.safetensors', "
                                   "which does not hold it"));
  }
  SECTION("the end of a shard") {
    fs::resize_file(path / "model-00003-of-00003.safetensors",
                    fs::file_size(path / "model-00003-of-00003.safetensors") - 1);
    CHECK_THAT(refused(), Contains("model-00003-of-00003.safetensors': tensor 'layer.2' ends at"));
  }
  SECTION("an index that makes no sense") {
    for (const char* text :
         {"", "{", "[]", "3", "{}", R"({"weight_map":[]})", R"({"weight_map":3})"}) {
      write_file(index, text);
      CHECK_THAT(refused(), Contains("model.safetensors.index.json' "));
    }
    for (const char* place : {"3", "null", "\"\"", "\".\"", "\"..\"", "\"../x.safetensors\"",
                              "\"/etc/passwd\"", "\"a/b\"", "\"a/\""}) {
      write_file(index, R"({"weight_map":{"layer.0":)" + std::string(place) + "}}");
      CHECK_THAT(refused(), Contains("tensor 'layer.0' must be placed in a file of the same"));
    }
    write_file(index, R"({"metadata":{"x":1},"weight_map":{"x":"y","x":"y"}})");
    CHECK_THAT(refused(), Contains("tensor 'x' is listed twice"));
  }
  SECTION("nothing: a single file comes before an index") {
    const Checkpoint single = checkpoint_of({6}, 13);
    SafetensorsWriter writer(path / "model.safetensors", single.tensors);
    writer.write(single.data);
    writer.finish();
    write_file(index, "{");
    single.check(path);
  }
}

}  // namespace
}  // namespace strata::model
