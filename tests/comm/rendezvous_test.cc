// Ranks that come, do not come, come twice, and strangers.
#include <sys/socket.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "comm/control.h"
#include "comm/ranks.h"
#include "comm/socket.h"
#include "temporary_directory.h"

namespace strata::comm {
namespace {

using namespace std::chrono_literals;

TEST_CASE("rendezvous: missing ranks are named to those that came") {
  ControlListener listener("localhost", 0);
  const int port = listener.port();
  std::string one;
  bool one_prints = true;
  std::thread rank1([&] {
    try {
      const Control control("localhost", port, options_of(1, 4));
    } catch (const RankFailure& error) {
      one = error.what();
      one_prints = error.should_print();
    }
  });
  ControlOptions options = options_of(0, 4);
  options.connect_timeout = 600ms;
  const std::string zero = message_of([&] { const Control control(std::move(listener), options); });
  rank1.join();
  CHECK(zero == "ranks 2, 3 of 4 have not come to port " + std::to_string(port) +
                    " of host host0 within 0.6 s; see whether they were started, and with this "
                    "MASTER_ADDR and MASTER_PORT");
  CHECK(one == zero);
  CHECK_FALSE(one_prints);
}

TEST_CASE("rendezvous: a taken port is named") {
  for (const char* address : {"localhost", "some.other.host"}) {
    const ControlListener first(address, 0);
    const std::string port = std::to_string(first.port());
    const std::string message =
        message_of([&] { const ControlListener second(address, first.port()); });
    INFO(message);
    CHECK(contains(message, "port " + port + " of host "));
    CHECK(contains(message, "is taken by another process; choose another MASTER_PORT"));
  }
}

TEST_CASE("rendezvous: a wrong address is one sentence within the timeout") {
  ControlOptions options = options_of(1, 2);
  options.connect_timeout = 500ms;
  int free_port = 0;
  {
    const ControlListener listener("127.0.0.1", 0);
    free_port = listener.port();
  }
  struct Case {
    std::string address;
    int port;
    std::string words;
  };
  for (const Case& one :
       {Case{"192.0.2.1", 29500, "cannot reach rank 0 at 192.0.2.1:29500 within 0.5 s"},
        Case{"127.0.0.1", free_port, "within 0.5 s: Connection refused; check MASTER_ADDR"},
        Case{"no-such-host.invalid", 29500, "the name 'no-such-host.invalid' has no address ("}}) {
    const std::string message =
        message_of([&] { const Control control(one.address, one.port, options); });
    INFO(message);
    CHECK(contains(message, one.words));
    CHECK(contains(message, "rank 1 of 2 (host host0, pid "));
  }
}

/// Sends `data` to a port and reads until the other side ends the connection.
void speak(int port, const std::string& data) {
  const Resolved at = resolve("127.0.0.1", port);
  const Connected connected = connect_until(at.addresses.at(0), Clock::now() + 5s);
  REQUIRE(connected.fd);
  static_cast<void>(::send(connected.fd.get(), data.data(), data.size(), MSG_NOSIGNAL));
  timeval patience{.tv_sec = 5, .tv_usec = 0};
  ::setsockopt(connected.fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  char byte = 0;
  while (::recv(connected.fd.get(), &byte, 1, 0) > 0) {
  }
}

TEST_CASE("rendezvous: strangers are turned away and the ranks find each other all the same") {
  ControlListener listener("127.0.0.1", 0);
  const int port = listener.port();
  std::string error;
  std::thread rank0([&] {
    error = message_of([&] {
      Control control(std::move(listener), options_of(0, 2));
      control.close();
    });
  });
  speak(port, "GET / HTTP/1.1\r\nHost: rank0\r\n\r\n");
  speak(port, "x");
  // The right magic, and then 2^56 bytes to come.
  speak(port, std::string("STRC\x01\x00\x01\x00", 8) + std::string(7, '\0') + "\x01");
  // A greeting that is cut off.
  speak(port, std::string("STRC\x01\x00\x01\x00\x04\x00\x00\x00\x00\x00\x00\x00????", 20));
  const Resolved at = resolve("127.0.0.1", port);
  const Connected silent = connect_until(at.addresses.at(0), Clock::now() + 5s);
  const std::string other = message_of([&] {
    Control control("127.0.0.1", port, options_of(1, 2));
    control.close();
  });
  rank0.join();
  CHECK(error.empty());
  CHECK(other.empty());
}

TEST_CASE("rendezvous: a stranger is mentioned where a rank is missing") {
  ControlListener listener("127.0.0.1", 0);
  const int port = listener.port();
  std::string error;
  std::thread rank0([&] {
    ControlOptions options = options_of(0, 2);
    options.connect_timeout = 400ms;
    error = message_of([&] { const Control control(std::move(listener), options); });
  });
  speak(port, "hello?");
  rank0.join();
  INFO(error);
  CHECK(contains(error, "rank 1 of 2 has not come"));
  CHECK(contains(error, "(1 connection came that was no rank, the last from "));
  CHECK(contains(error, "127.0.0.1:"));
}

TEST_CASE("rendezvous: another version of strata is told apart") {
  ControlListener listener("127.0.0.1", 0);
  const int port = listener.port();
  std::string error;
  std::thread rank0([&] {
    error = message_of([&] { const Control control(std::move(listener), options_of(0, 2)); });
  });
  speak(port, std::string("STRC\xff\xff\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00", 16));
  rank0.join();
  INFO(error);
  CHECK(contains(error, "runs another version of strata"));
}

/// What rank 0 of two and the given newcomers say; rank 1 has come before.
std::vector<std::string> meet(int ranks, const std::vector<ControlOptions>& newcomers) {
  ControlListener listener("127.0.0.1", 0);
  const int port = listener.port();
  std::vector<std::string> errors(newcomers.size() + 1);
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    errors[0] =
        message_of([&] { const Control control(std::move(listener), options_of(0, ranks)); });
  });
  for (size_t i = 0; i < newcomers.size(); ++i) {
    threads.emplace_back([&, i] {
      errors[i + 1] = message_of([&] { const Control control("127.0.0.1", port, newcomers[i]); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST_CASE("rendezvous: two processes of one rank, and a rank of another run") {
  const auto twice = meet(3, {options_of(1, 3), options_of(1, 3)});
  for (const std::string& error : twice) {
    INFO(error);
    CHECK(contains(error, "a second rank 1 of 3 (host host0, pid "));
    CHECK(contains(error, "each process needs a RANK of its own"));
  }
  const auto other = meet(3, {options_of(1, 4)});
  for (const std::string& error : other) {
    INFO(error);
    CHECK(contains(error, "rank 1 of 4 (host host0, pid "));
    CHECK(contains(error, "came to a run of 3 ranks"));
  }
}

TEST_CASE("rendezvous: another program at rank 0's port is told apart") {
  for (const bool talks : {true, false}) {
    // It takes connections; one kind greets, as many services do, the other says nothing.
    const UniqueFd listener = listen_at("127.0.0.1", 0);
    std::atomic<bool> is_over = false;
    std::thread program([&] {
      std::vector<UniqueFd> kept;
      while (!is_over) {
        SocketAddress from;
        UniqueFd fd = accept_one(listener.get(), from);
        if (fd && talks) static_cast<void>(::send(fd.get(), "220 mail\r\n", 10, MSG_NOSIGNAL));
        if (fd) kept.push_back(std::move(fd));
        std::this_thread::sleep_for(5ms);
      }
    });
    ControlOptions options = options_of(1, 2);
    options.connect_timeout = 400ms;
    const std::string message =
        message_of([&] { const Control control("127.0.0.1", port_of(listener.get()), options); });
    is_over = true;
    program.join();
    INFO(message);
    CHECK(contains(message, talks ? "another program than rank 0 answers at 127.0.0.1:"
                                  : "what listens there does not answer as rank 0 does"));
  }
}

}  // namespace
}  // namespace strata::comm
