#include "worker/examples/text_data.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "tests/unit/examples/test_text.h"

namespace everstep::examples {
namespace {

namespace fs = std::filesystem;

class TextDataTest : public testing::Test {
 protected:
  TextDataTest() {
    std::string pattern = (fs::temp_directory_path() / "everstep-text-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~TextDataTest() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  void Write(const std::string& name, const std::string& bytes) {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
  }
  // What a load of the folder read, from the training part's start.
  static std::string Start(const TextData& data, size_t count) {
    std::string text;
    for (size_t at = 0; text.size() < count; at += 8) {
      const std::vector<int64_t> offsets = {static_cast<int64_t>(at)};
      const TokenBatch batch = data.BatchAt(offsets);
      text.append(batch.inputs.begin(), batch.inputs.end());
    }
    return text.substr(0, count);
  }

  fs::path folder_;
};

TEST_F(TextDataTest, ReadsFolderInPathOrderEachFileOnceAndSkipsBinaries) {
  Write("b.txt", std::string(100, 'b'));
  Write("a/z.txt", std::string(60, 'z'));
  Write("a/y.txt", std::string(40, 'y'));
  Write("binary", std::string("text\0text", 9));
  fs::create_symlink("b.txt", folder_ / "c.txt");  // a second name of one file
  fs::create_symlink("..", folder_ / "a" / "loop");
  fs::create_symlink("nowhere", folder_ / "dangling");
  Write("d.txt", std::string(200, 'd'));
  const TextData data = TextData::Load(folder_.string(), 8).value();
  EXPECT_EQ(data.file_count(), 4);
  EXPECT_EQ(data.skipped_file_count(), 1);
  EXPECT_EQ(data.train_bytes() + data.validation_bytes(), 400);
  EXPECT_EQ(data.validation_bytes(), 20);
  EXPECT_EQ(Start(data, 208),
            std::string(40, 'y') + std::string(60, 'z') + std::string(100, 'b') + "dddddddd");
}

TEST_F(TextDataTest, ReadsSingleFileAndLinkToIt) {
  Write("text", GrammarText(2000));
  fs::create_symlink("text", folder_ / "link");
  const TextData direct = TextData::Load((folder_ / "text").string(), 16).value();
  const TextData linked = TextData::Load((folder_ / "link").string(), 16).value();
  EXPECT_EQ(direct.digest(), linked.digest());
  EXPECT_EQ(direct.digest(), TextData::FromBytes(GrammarText(2000), "memory", 16)->digest());
  EXPECT_EQ(direct.file_count(), 1);
}

TEST_F(TextDataTest, RefusesMissingEmptyAndTooShortDataByPathWithRemedy) {
  const auto refuses = [](const std::string& path, StatusCode code) {
    const Status status = TextData::Load(path, 32).status();
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_NE(status.message().find(path), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("--data"), std::string::npos) << status.message();
  };
  refuses((folder_ / "missing").string(), StatusCode::kNotFound);
  refuses(folder_.string(), StatusCode::kInvalidArgument);
  Write("empty", "");
  refuses((folder_ / "empty").string(), StatusCode::kInvalidArgument);
  Write("binary", std::string("\0\0", 2));
  refuses(folder_.string(), StatusCode::kInvalidArgument);
  Write("short", std::string(20 * 33 - 1, 's'));
  refuses((folder_ / "short").string(), StatusCode::kInvalidArgument);
  refuses("/dev/null", StatusCode::kInvalidArgument);
  Write("enough", std::string(20 * 33, 's'));
  EXPECT_TRUE(TextData::Load((folder_ / "enough").string(), 32).ok());
}

TEST_F(TextDataTest, SamplesArePureFunctionOfSeedStepAndMicroBatch) {
  const TextData data = TextData::FromBytes(GrammarText(20'000), "memory", 32).value();
  const TextData again = TextData::FromBytes(GrammarText(20'000), "memory", 32).value();
  std::set<std::vector<int64_t>> seen;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    for (int64_t step = 0; step < 8; ++step) {
      for (int64_t i = 0; i < 8; ++i) seen.insert(data.SampleOffsets(seed, Step(step), i, 4));
    }
  }
  EXPECT_EQ(seen.size(), 4u * 8 * 8) << "two (seed, step, micro-batch) share their samples";
  // Asked in the opposite order, of another object: the same answers.
  for (int64_t step = 8; step-- > 0;) {
    for (int64_t i = 8; i-- > 0;) {
      EXPECT_TRUE(seen.contains(again.SampleOffsets(3, Step(step), i, 4)));
    }
  }
  // Fixed for ever: a resumed run must find the samples of its first half.
  const TextData fixed = TextData::FromBytes(std::string(1'000'000, 'x'), "memory", 64).value();
  EXPECT_EQ(fixed.SampleOffsets(1, Step(2), 3, 3), (std::vector<int64_t>{645918, 14352, 634264}));
}

TEST_F(TextDataTest, SamplesStayInsideTheirPart) {
  const TextData data = TextData::FromBytes(GrammarText(2'000), "memory", 32).value();
  for (int64_t step = 0; step < 500; ++step) {
    for (const int64_t offset : data.SampleOffsets(1, Step(step), 0, 4)) {
      ASSERT_GE(offset, 0);
      ASSERT_LT(offset + data.sequence_length(), data.train_bytes());
    }
  }
  const std::vector<int64_t> offsets = data.ValidationOffsets(5);
  ASSERT_EQ(offsets.size(), 5u);
  EXPECT_EQ(offsets.front(), data.train_bytes());
  EXPECT_EQ(offsets.back() + data.sequence_length() + 1,
            data.train_bytes() + data.validation_bytes());
  EXPECT_EQ(data.ValidationOffsets(1), (std::vector<int64_t>{data.train_bytes()}));
}

TEST_F(TextDataTest, TargetsAreTheFollowingBytes) {
  const TextData data = TextData::FromBytes(GrammarText(2'000), "memory", 8).value();
  const std::vector<int64_t> offsets = {5, 100};
  const TokenBatch batch = data.BatchAt(offsets);
  const std::string text = GrammarText(2'000);
  EXPECT_EQ(std::string(batch.inputs.begin(), batch.inputs.end()),
            text.substr(5, 8) + text.substr(100, 8));
  EXPECT_EQ(std::string(batch.targets.begin(), batch.targets.end()),
            text.substr(6, 8) + text.substr(101, 8));
}

}  // namespace
}  // namespace everstep::examples
