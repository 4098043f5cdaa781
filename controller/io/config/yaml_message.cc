#include "controller/io/config/yaml_message.h"

#include <errno.h>
#include <fmt/format.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/duration.pb.h>
#include <string.h>
#include <sys/stat.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>

#include "proto/convert/reader.h"

namespace everstep {
namespace {

namespace pb = google::protobuf;

constexpr int kNodesMax = 200'000;  // aliases can make a small file describe a huge tree
constexpr size_t kProblemsMax = 50;

std::string Shown(const YAML::Node& node) {
  if (node.IsNull()) return "nothing";
  if (node.IsMap()) return "a map";
  if (node.IsSequence()) return "a list";
  std::string text = node.Scalar().substr(0, 60);
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return "\"" + text + "\"";
}

std::string Lower(std::string text) {
  for (char& c : text) c = static_cast<char>(tolower(static_cast<unsigned char>(c)));
  return text;
}

// What an enum's values are called in a file: without the prefix that all of them share, in lower case.
std::map<std::string, int> EnumNames(const pb::EnumDescriptor* descriptor) {
  std::string prefix = descriptor->value(0)->name();
  prefix = prefix.substr(0, prefix.size() - std::string("UNSPECIFIED").size());
  std::map<std::string, int> names;
  for (int i = 1; i < descriptor->value_count(); ++i) {
    const std::string& name = descriptor->value(i)->name();
    names[Lower(name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name)] =
        descriptor->value(i)->number();
  }
  return names;
}

class YamlReader {
 public:
  YamlReader(std::string file, YamlReading* reading) : file_(std::move(file)), reading_(reading) {}

  void ReadMap(const YAML::Node& node, const std::string& path, pb::Message* message) {
    if (!node.IsMap()) {
      if (!node.IsNull()) {
        Problem(node, path, fmt::format("needs a map of fields, not {}", Shown(node)));
      }
      return;
    }
    const pb::Descriptor* descriptor = message->GetDescriptor();
    std::set<const pb::FieldDescriptor*> seen;
    for (const auto& entry : node) {
      if (!CountNode(node)) return;
      if (!entry.first.IsScalar()) {
        Problem(entry.first, path, "has a field whose name is not a text");
        continue;
      }
      const std::string& name = entry.first.Scalar();
      const pb::FieldDescriptor* field = descriptor->FindFieldByName(name);
      if (field == nullptr) field = descriptor->FindFieldByCamelcaseName(name);
      if (field == nullptr) {
        UnknownField(entry.first, path, name, descriptor);
        continue;
      }
      const std::string inner = path.empty() ? field->name() : path + "." + field->name();
      if (!seen.insert(field).second) {
        Problem(entry.first, inner, "is given twice; keep one");
        continue;
      }
      reading_->lines.emplace(inner, Line(entry.first));
      ReadField(entry.second, inner, message, field);
    }
  }

 private:
  static int Line(const YAML::Node& node) { return node.Mark().line + 1; }

  void Problem(const YAML::Node& node, const std::string& path, const std::string& what) {
    if (reading_->problems.size() >= kProblemsMax) return;
    const std::string where = path.empty() ? std::string() : path + ": ";
    reading_->problems.push_back(fmt::format("{}:{}: {}{}", file_, Line(node), where, what));
  }

  void UnknownField(const YAML::Node& node, const std::string& path, const std::string& name,
                    const pb::Descriptor* descriptor) {
    std::vector<std::string> names;
    for (int i = 0; i < descriptor->field_count(); ++i) names.push_back(descriptor->field(i)->name());
    const std::string nearest = NearestName(name, names);
    std::sort(names.begin(), names.end());
    const std::string remedy = nearest.empty()
                                   ? fmt::format("the fields here are {}", fmt::join(names, ", "))
                                   : fmt::format("did you mean \"{}\"?", nearest);
    Problem(node, path, fmt::format("unknown field {}; {}", Shown(node), remedy));
  }

  bool CountNode(const YAML::Node& node) {
    if (++nodes_ <= kNodesMax) return true;
    if (nodes_ == kNodesMax + 1) {
      Problem(node, "", fmt::format("the file describes more than {} values", kNodesMax));
    }
    return false;
  }

  void ReadField(const YAML::Node& node, const std::string& path, pb::Message* message,
                 const pb::FieldDescriptor* field) {
    if (field->is_map()) {
      ReadTextMap(node, path, message, field);
    } else if (field->is_repeated()) {
      if (!node.IsSequence()) {
        if (!node.IsNull()) Problem(node, path, fmt::format("needs a list, not {}", Shown(node)));
        return;
      }
      int index = 0;
      for (const auto& item : node) {
        if (!CountNode(node)) return;
        ReadItem(item, fmt::format("{}[{}]", path, index++), message, field);
      }
    } else {
      ReadItem(node, path, message, field);
    }
  }

  // Maps of the schema are text to text.
  void ReadTextMap(const YAML::Node& node, const std::string& path, pb::Message* message,
                   const pb::FieldDescriptor* field) {
    if (!node.IsMap()) {
      if (!node.IsNull()) {
        Problem(node, path, fmt::format("needs a map of texts, not {}", Shown(node)));
      }
      return;
    }
    std::set<std::string> seen;
    for (const auto& entry : node) {
      if (!CountNode(node)) return;
      if (!entry.first.IsScalar() || !entry.second.IsScalar()) {
        Problem(entry.first, path, "needs a text for each name");
        continue;
      }
      const std::string& key = entry.first.Scalar();
      if (!seen.insert(key).second) {
        Problem(entry.first, path, fmt::format("gives \"{}\" twice; keep one", key));
        continue;
      }
      pb::Message* pair = message->GetReflection()->AddMessage(message, field);
      const pb::Descriptor* type = pair->GetDescriptor();
      pair->GetReflection()->SetString(pair, type->map_key(), key);
      pair->GetReflection()->SetString(pair, type->map_value(), entry.second.Scalar());
    }
  }

  void ReadItem(const YAML::Node& node, const std::string& path, pb::Message* message,
                const pb::FieldDescriptor* field) {
    using F = pb::FieldDescriptor;
    const pb::Reflection* reflection = message->GetReflection();
    if (field->cpp_type() == F::CPPTYPE_MESSAGE) {
      pb::Message* inner = field->is_repeated() ? reflection->AddMessage(message, field)
                                                : reflection->MutableMessage(message, field);
      if (field->message_type()->full_name() == "google.protobuf.Duration") {
        ReadDurationInto(node, path, inner);
      } else {
        ReadMap(node, path, inner);
      }
      return;
    }
    if (!node.IsScalar()) {
      Problem(node, path, fmt::format("needs one value, not {}", Shown(node)));
      return;
    }
    const bool add = field->is_repeated();
    switch (field->cpp_type()) {
      case F::CPPTYPE_STRING:
        if (ToUtf8(node.Scalar(), node.Scalar().size()) != node.Scalar()) {
          Problem(node, path, "is not UTF-8 text");
        } else if (add) {
          reflection->AddString(message, field, node.Scalar());
        } else {
          reflection->SetString(message, field, node.Scalar());
        }
        break;
      case F::CPPTYPE_BOOL: {
        const std::string text = Lower(node.Scalar());
        if (text != "true" && text != "false") {
          Problem(node, path, fmt::format("{} is neither true nor false", Shown(node)));
        } else if (!add) {
          reflection->SetBool(message, field, text == "true");
        }
        break;
      }
      case F::CPPTYPE_INT32:
        if (int64_t value = 0; ReadWhole(node, path, INT32_MIN, INT32_MAX, &value) && !add) {
          reflection->SetInt32(message, field, static_cast<int32_t>(value));
        }
        break;
      case F::CPPTYPE_INT64:
        if (int64_t value = 0; ReadWhole(node, path, INT64_MIN, INT64_MAX, &value) && !add) {
          reflection->SetInt64(message, field, value);
        }
        break;
      case F::CPPTYPE_ENUM: {
        const auto names = EnumNames(field->enum_type());
        const auto found = names.find(Lower(node.Scalar()));
        if (found == names.end()) {
          std::vector<std::string> allowed;
          for (const auto& [name, number] : names) allowed.push_back(name);
          Problem(node, path, fmt::format("{} is not one of {}", Shown(node), fmt::join(allowed, ", ")));
        } else if (!add) {
          reflection->SetEnumValue(message, field, found->second);
        }
        break;
      }
      default:
        Problem(node, path, "is of a type that files cannot give");
        break;
    }
  }

  bool ReadWhole(const YAML::Node& node, const std::string& path, int64_t lowest, int64_t highest,
                 int64_t* value) {
    const std::string& text = node.Scalar();
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
    if (error == std::errc() && end == text.data() + text.size() && *value >= lowest &&
        *value <= highest) {
      return true;
    }
    Problem(node, path, fmt::format("{} is not a whole number from {} to {}", Shown(node), lowest, highest));
    return false;
  }

  void ReadDurationInto(const YAML::Node& node, const std::string& path, pb::Message* message) {
    if (!node.IsScalar()) {
      Problem(node, path, fmt::format("needs a duration like \"5s\", not {}", Shown(node)));
      return;
    }
    const auto duration = ParseDuration(node.Scalar());
    if (!duration.ok()) {
      Problem(node, path, duration.status().message());
      return;
    }
    WriteDuration(*duration, static_cast<pb::Duration*>(message));
  }

  const std::string file_;
  YamlReading* const reading_;
  int nodes_ = 0;
};

}  // namespace

YamlReading ReadYaml(const std::string& text, const std::string& name, pb::Message* message) {
  YamlReading reading;
  if (text.size() > kYamlBytesMax) {
    reading.problems.push_back(
        fmt::format("{}: has {} bytes; at most {} are allowed", name, text.size(), kYamlBytesMax));
    return reading;
  }
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.size() > 1) {
      reading.problems.push_back(fmt::format("{}: holds {} documents; keep one", name, documents.size()));
      return reading;
    }
    if (documents.empty()) return reading;
    YamlReader(name, &reading).ReadMap(documents[0], "", message);
  } catch (const YAML::Exception& error) {
    reading.problems.push_back(fmt::format("{}:{}: is not YAML: {}", name, error.mark.line + 1, error.msg));
  }
  return reading;
}

Result<std::string> ReadSmallFile(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    const std::string message = fmt::format("{}: {}", path, strerror(errno));
    return errno == EACCES ? Status(StatusCode::kPermissionDenied, message) : NotFound(message);
  }
  if (S_ISDIR(info.st_mode)) return InvalidArgument(fmt::format("{}: is a folder; name a file", path));
  if (static_cast<uint64_t>(info.st_size) > kYamlBytesMax) {
    return InvalidArgument(
        fmt::format("{}: has {} bytes; at most {} are allowed", path, info.st_size, kYamlBytesMax));
  }
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) {
    return Status(StatusCode::kPermissionDenied, fmt::format("{}: cannot be read: {}", path, strerror(errno)));
  }
  return text.str();
}

Result<Duration> ParseDuration(std::string_view text) {
  static constexpr std::pair<std::string_view, int64_t> kUnits[] = {
      {"ns", 1}, {"us", 1'000}, {"ms", 1'000'000}, {"s", 1'000'000'000},
      {"m", 60'000'000'000}, {"h", 3'600'000'000'000}};
  const std::string shown(text.substr(0, 40));
  const auto bad = [&](const char* why) {
    return InvalidArgument(fmt::format("\"{}\" {}; write a duration like \"5s\", \"250ms\" or \"1m30s\"", shown, why));
  };
  if (text.empty()) return bad("is empty");
  Duration total{};
  while (!text.empty()) {
    double number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number,
                                              std::chars_format::fixed);
    if (error != std::errc() || number < 0) return bad("is not a duration");
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    size_t length = 0;
    while (length < text.size() && isalpha(static_cast<unsigned char>(text[length]))) ++length;
    const std::string_view unit = text.substr(0, length);
    if (unit.empty()) return bad("has no unit");
    const auto* found = std::find_if(std::begin(kUnits), std::end(kUnits),
                                     [&](const auto& entry) { return entry.first == unit; });
    if (found == std::end(kUnits)) return bad("has an unknown unit");
    const double nanoseconds = number * static_cast<double>(found->second);
    if (ToSeconds(total) + nanoseconds / 1e9 > 1e9) return bad("is too long");
    total += Duration(std::llround(nanoseconds));
    text.remove_prefix(length);
  }
  return total;
}

std::string NearestName(std::string_view text, const std::vector<std::string>& candidates) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, text.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    // Levenshtein distance, one row at a time.
    std::vector<size_t> row(candidate.size() + 1);
    for (size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (size_t i = 0; i < std::min<size_t>(text.size(), 100); ++i) {
      size_t diagonal = row[0];
      row[0] = i + 1;
      for (size_t j = 0; j < candidate.size(); ++j) {
        const size_t change = diagonal + (text[i] == candidate[j] ? 0 : 1);
        diagonal = row[j + 1];
        row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, change});
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = candidate;
    }
  }
  return best;
}

}  // namespace everstep
