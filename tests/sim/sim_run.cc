// Runs seeds of the simulator by hand, one or without end; see --help. tests/sim/soak starts it.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>

#include "controller/sim/run.h"

namespace {

constexpr const char* kHelp =
    "usage: sim_run [--profile small|large] [--seed N] [--count N | --hours H] [--trace] [--marks SOURCE] [--quiet]\n"
    "\n"
    "Runs seeds N, N+1, ... of the simulator and prints one line each: seed, faults, steps, trace hash, verdict.\n"
    "Exit code 1 when a seed violates something, 2 for a usage error.\n"
    "\n"
    "  --trace   print the whole conversation of each seed\n"
    "  --marks SOURCE   at the end: faults, coverage marks (each notice of the cores is one) and how many seeds hit them,\n"
    "            and those in the sources below SOURCE that none hit\n"
    "  --quiet   lines only for seeds that fail, and a summary each 100 seeds\n";

// The constant texts of all notices in the cores: rare branches carry one each.
std::set<std::string> MarksOf(const std::string& source) {
  std::set<std::string> marks;
  const std::regex note("Note\\([^;\"]*\"((?:[^\"\\\\]|\\\\.)*)\"(?:\\s*\"([^\"]*)\")?");
  for (const char* folder : {"/controller/core", "/worker/core/agent"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(source + folder)) {
      if (entry.path().extension() != ".cc") continue;
      std::ifstream file(entry.path());
      const std::string text{std::istreambuf_iterator<char>(file), {}};
      for (std::sregex_iterator it(text.begin(), text.end(), note), end; it != end; ++it) {
        marks.insert((*it)[1].str() + (*it)[2].str());
      }
    }
  }
  return marks;
}

}  // namespace

int main(int argc, char** argv) {
  using everstep::sim::Profile;
  Profile profile = Profile::kSmall;
  uint64_t seed = 1, count = 1;
  double hours = 0;
  bool trace = false, quiet = false;
  std::string marks;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    auto number = [&](uint64_t& out) {
      return value != nullptr && std::from_chars(value, value + std::strlen(value), out).ec == std::errc();
    };
    if (flag == "--trace") {
      trace = true;
    } else if (flag == "--marks" && value != nullptr && std::filesystem::exists(std::string(value) + "/controller/core")) {
      marks = value;
      ++i;
    } else if (flag == "--quiet") {
      quiet = true;
    } else if (flag == "--profile" && value != nullptr && (std::string(value) == "small" || std::string(value) == "large")) {
      profile = std::string(value) == "small" ? Profile::kSmall : Profile::kLarge;
      ++i;
    } else if (flag == "--seed" && number(seed)) {
      ++i;
    } else if (flag == "--count" && number(count)) {
      ++i;
    } else if (flag == "--hours" && value != nullptr && std::atof(value) > 0) {
      hours = std::atof(value);
      count = UINT64_MAX;
      ++i;
    } else {
      std::fputs(kHelp, flag == "--help" ? stdout : stderr);
      return flag == "--help" ? 0 : 2;
    }
  }
  const auto started = std::chrono::steady_clock::now();
  auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count(); };
  std::map<std::string, int> hit, faults;
  std::vector<int> fault_counts;
  uint64_t failed = 0, done = 0;
  for (uint64_t n = seed; done < count && (hours == 0 || elapsed() < hours * 3600); ++n, ++done) {
    everstep::sim::RunSettings settings;
    settings.keep_trace = trace;
    const double before = elapsed();
    const everstep::sim::RunReport report = everstep::sim::RunSeed(n, profile, settings);
    for (const std::string& line : report.trace) std::printf("%s\n", line.c_str());
    for (const std::string& mark : report.marks) ++hit[mark];
    for (const auto& [kind, times] : report.fault_counts) faults[kind] += times;
    fault_counts.push_back(report.faults);
    if (!report.violations.empty() || !quiet) {
      std::printf("seed %llu %s faults=%d steps=%lld generations=%llu heartbeats=%llu events=%llu healed_in=%.1fs hash=%016llx %.2fs\n",
                  static_cast<unsigned long long>(n), report.violations.empty() ? "ok" : "VIOLATION", report.faults,
                  static_cast<long long>(report.steps), static_cast<unsigned long long>(report.generations),
                  static_cast<unsigned long long>(report.heartbeats), static_cast<unsigned long long>(report.events),
                  everstep::ToSeconds(report.healing), static_cast<unsigned long long>(report.trace_hash), elapsed() - before);
    }
    if (!report.violations.empty()) {
      ++failed;
      std::printf("  options: %s\n", report.options.c_str());
      for (const everstep::sim::Violation& v : report.violations) std::printf("  %s: %s\n", v.checker.c_str(), v.what.c_str());
      std::printf("  repeat: sim_run --profile %s --seed %llu --trace\n", profile == Profile::kSmall ? "small" : "large",
                  static_cast<unsigned long long>(n));
    } else if (quiet && (done + 1) % 100 == 0) {
      std::printf("%llu seeds, %llu failed, %.0f s\n", static_cast<unsigned long long>(done + 1), static_cast<unsigned long long>(failed), elapsed());
    }
    std::fflush(stdout);
  }
  std::sort(fault_counts.begin(), fault_counts.end());
  std::printf("%llu seeds, %llu failed, median %d faults a seed, %.1f s\n", static_cast<unsigned long long>(done),
              static_cast<unsigned long long>(failed), fault_counts.empty() ? 0 : fault_counts[fault_counts.size() / 2], elapsed());
  if (!marks.empty()) {
    for (const auto& [kind, times] : faults) std::printf("fault %-24s %d\n", kind.c_str(), times);
    for (const auto& [mark, times] : hit) std::printf("mark %-60s in %d seeds\n", mark.c_str(), times);
    for (const std::string& mark : MarksOf(marks)) {
      if (!hit.contains(mark)) std::printf("never hit %s\n", mark.c_str());
    }
  }
  return failed == 0 ? 0 : 1;
}
