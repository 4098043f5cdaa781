// Real processes with static addresses, no controller and no agent: however many ranks share the global batch, and
// however the layers are cut, losses and the final weights are the same bits (exact reduction).
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace everstep {
namespace {

struct RankRun {
  pid_t pid = -1;
  std::string output_path;
  int exit_code = -1;
};

// Ports that were free a moment ago, all different.
std::vector<int> FreePorts(int count) {
  std::vector<int> sockets, ports;
  for (int i = 0; i < count; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
    sockets.push_back(fd);
    ports.push_back(ntohs(address.sin_port));
  }
  for (const int fd : sockets) close(fd);
  return ports;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

class StaticWorldTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "/everstep-static-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }

  // Runs a world to its end. Every rank's output and step log are in folder_ afterwards.
  std::vector<RankRun> Run(const std::string& name, int ranks, int stages, std::vector<std::string> arguments) {
    std::string world;
    for (const int port : FreePorts(ranks)) world += (world.empty() ? "" : ",") + ("127.0.0.1:" + std::to_string(port));
    const std::string logs = folder_ + "/" + name;
    EXPECT_EQ(mkdir(logs.c_str(), 0755), 0);
    arguments.insert(arguments.begin(), EVERSTEP_TRAIN);
    std::vector<RankRun> runs(static_cast<size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      RankRun& run = runs[static_cast<size_t>(rank)];
      run.output_path = logs + "/rank-" + std::to_string(rank) + ".out";
      run.pid = fork();
      if (run.pid != 0) continue;
      setenv("EVERSTEP_STATIC_WORLD", world.c_str(), 1);
      setenv("EVERSTEP_STATIC_RANK", std::to_string(rank).c_str(), 1);
      setenv("EVERSTEP_STATIC_PP", std::to_string(stages).c_str(), 1);
      setenv("EVERSTEP_OUTPUT_DIR", logs.c_str(), 1);
      if (freopen(run.output_path.c_str(), "w", stdout) == nullptr) _exit(99);
      std::vector<char*> argv;
      for (std::string& argument : arguments) argv.push_back(argument.data());
      argv.push_back(nullptr);
      execv(argv[0], argv.data());
      _exit(98);
    }
    for (RankRun& run : runs) {
      int status = 0;
      EXPECT_EQ(waitpid(run.pid, &status, 0), run.pid);
      run.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }
    return runs;
  }

  // The leader's lines, after all ranks ended well.
  std::string Output(const std::string& name, int ranks, int stages, const std::vector<std::string>& arguments) {
    const std::vector<RankRun> runs = Run(name, ranks, stages, arguments);
    for (size_t rank = 0; rank < runs.size(); ++rank) {
      EXPECT_EQ(runs[rank].exit_code, 0) << name << " rank " << rank;
      if (rank > 0) {
        EXPECT_EQ(ReadFile(runs[rank].output_path), "") << "only the leader prints";
      }
    }
    return ReadFile(runs[0].output_path);
  }

  std::string folder_;
};

TEST_F(StaticWorldTest, AnyNumberOfRanksAndStagesGivesTheSameBits) {
  const std::vector<std::string> arguments = {"--size", "tiny", "--steps", "12"};
  const std::string alone = Output("1", 1, 1, arguments);
  ASSERT_NE(alone.find("step 12 loss "), std::string::npos) << alone;
  ASSERT_NE(alone.find("final digest "), std::string::npos) << alone;
  EXPECT_EQ(Output("4", 4, 1, arguments), alone);
  EXPECT_EQ(Output("3", 3, 1, arguments), alone);
  EXPECT_EQ(Output("2x2", 4, 2, arguments), alone);
  EXPECT_EQ(Output("1x2", 2, 2, arguments), alone);
}

TEST_F(StaticWorldTest, DoublePrecisionTooGivesTheSameBits) {
  const std::vector<std::string> arguments = {"--size", "tiny", "--steps", "5", "--fp64"};
  const std::string alone = Output("1", 1, 1, arguments);
  ASSERT_NE(alone.find("final digest "), std::string::npos) << alone;
  EXPECT_EQ(Output("3", 3, 1, arguments), alone);
  EXPECT_EQ(Output("2x2", 4, 2, arguments), alone);
}

TEST_F(StaticWorldTest, NativeReductionRepeatsItsBitsAtEqualWidth) {
  const std::vector<std::string> arguments = {"--size", "tiny", "--steps", "5", "--reduction", "native"};
  const std::string first = Output("a", 3, 1, arguments);
  ASSERT_NE(first.find("final digest "), std::string::npos) << first;
  EXPECT_EQ(Output("b", 3, 1, arguments), first);
}

TEST_F(StaticWorldTest, TheStepLogTellsEachStepOnceInOrder) {
  (void)Output("logs", 2, 1, {"--size", "tiny", "--steps", "3"});
  for (int process : {1, 2}) {
    std::istringstream lines(ReadFile(folder_ + "/logs/steps-" + std::to_string(process) + ".log"));
    std::vector<std::string> kinds;
    std::string line;
    while (std::getline(lines, line)) {
      std::istringstream words(line);
      std::string kind, word, step;
      words >> kind >> word >> step;
      kinds.push_back(kind + " " + step);
    }
    EXPECT_EQ(kinds, (std::vector<std::string>{"computed 1", "applied 1", "computed 2", "applied 2", "computed 3",
                                               "applied 3"}));
  }
}

TEST_F(StaticWorldTest, WithoutRecoveryALostRankEndsTheOthersWithAnError) {
  const std::vector<int> ports = FreePorts(2);
  const std::string world = "127.0.0.1:" + std::to_string(ports[0]) + ",127.0.0.1:" + std::to_string(ports[1]);
  const auto start = [&](int rank, const char* steps, const char* output) {
    const pid_t pid = fork();
    if (pid != 0) return pid;
    setenv("EVERSTEP_STATIC_WORLD", world.c_str(), 1);
    setenv("EVERSTEP_STATIC_RANK", std::to_string(rank).c_str(), 1);
    if (freopen(output, "w", stdout) == nullptr) _exit(99);
    execl(EVERSTEP_TRAIN, EVERSTEP_TRAIN, "--size", "tiny", "--steps", steps, nullptr);
    _exit(98);
  };
  const std::string output = folder_ + "/rank-0.out";
  ASSERT_EQ(mkfifo(output.c_str(), 0600), 0);
  const pid_t survivor = start(0, "1000000", output.c_str());
  const pid_t victim = start(1, "1000000", (folder_ + "/rank-1.out").c_str());
  std::ifstream lines(output);
  std::string line;
  while (line.rfind("step 3 ", 0) != 0) ASSERT_TRUE(std::getline(lines, line)) << "ended early";
  kill(victim, SIGKILL);
  while (std::getline(lines, line)) {}
  int status = 0;
  waitpid(victim, &status, 0);
  EXPECT_EQ(waitpid(survivor, &status, 0), survivor);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 1);
}

}  // namespace
}  // namespace everstep
