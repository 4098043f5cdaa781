// Fills every field of a message with a legal, nonzero value, by reflection, so that a converter which forgets a field
// is caught: message -> model -> message must give back the same. Tests only.
#pragma once

#include <google/protobuf/message.h>

#include <string>

namespace everstep::testing {

class MessageFiller {
 public:
  // Fills all fields outside of oneofs, and in each oneof the `choice`-th (counted modulo its size).
  void Fill(google::protobuf::Message* message, int choice) {
    using google::protobuf::FieldDescriptor;
    const auto* descriptor = message->GetDescriptor();
    const auto* reflection = message->GetReflection();
    if (descriptor->full_name() == "google.protobuf.Duration") {
      reflection->SetInt64(message, descriptor->FindFieldByName("seconds"), Next());
      reflection->SetInt32(message, descriptor->FindFieldByName("nanos"), Next() * 1000);
      return;
    }
    for (int i = 0; i < descriptor->field_count(); ++i) {
      const FieldDescriptor* field = descriptor->field(i);
      if (const auto* oneof = field->real_containing_oneof()) {
        if (field != oneof->field(choice % oneof->field_count())) continue;
      }
      if (field->is_repeated()) {
        if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
          Fill(reflection->AddMessage(message, field), choice);
        } else {
          AddScalar(message, field);
          AddScalar(message, field);
        }
      } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        Fill(reflection->MutableMessage(message, field), choice);
      } else {
        SetScalar(message, field);
      }
    }
  }

 private:
  // 1 … 14: small enough for every bounded number (an exit code, a status code).
  int Next() { return counter_++ % 14 + 1; }

  std::string Text(const google::protobuf::FieldDescriptor* field) {
    const std::string& name = field->name();
    if (name == "token") return "0123456789abcdef";
    if (name == "heartbeat_key") return "0123456789abcdef0123456789abcdef";
    if (name == "reason" || name == "decision" || name == "fence_reason") return "ServerSilent";
    if (name.find("address") != std::string::npos) return "host" + std::to_string(Next()) + ":1234";
    return name + std::to_string(Next());
  }

  void SetScalar(google::protobuf::Message* m, const google::protobuf::FieldDescriptor* field) {
    using F = google::protobuf::FieldDescriptor;
    const auto* r = m->GetReflection();
    switch (field->cpp_type()) {
      case F::CPPTYPE_INT32:
        // Ranks are listed by rank: the only one in a list is 0, and proto3 does not show it.
        if (m->GetDescriptor()->name() == "RankAssignment" && field->name() == "rank") return;
        r->SetInt32(m, field, Next());
        break;
      case F::CPPTYPE_INT64: r->SetInt64(m, field, Next()); break;
      case F::CPPTYPE_UINT32:
        r->SetUInt32(m, field, field->name() == "format_version" ? 1 : Next());
        break;
      case F::CPPTYPE_UINT64: r->SetUInt64(m, field, Next()); break;
      case F::CPPTYPE_DOUBLE: r->SetDouble(m, field, Next() + 0.5); break;
      case F::CPPTYPE_FLOAT: r->SetFloat(m, field, 0.5f); break;
      case F::CPPTYPE_BOOL: r->SetBool(m, field, true); break;
      case F::CPPTYPE_ENUM: {
        const auto* e = field->enum_type();
        r->SetEnum(m, field, e->value(1 + counter_++ % (e->value_count() - 1)));
        break;
      }
      case F::CPPTYPE_STRING: r->SetString(m, field, Text(field)); break;
      case F::CPPTYPE_MESSAGE: break;
    }
  }

  void AddScalar(google::protobuf::Message* m, const google::protobuf::FieldDescriptor* field) {
    using F = google::protobuf::FieldDescriptor;
    const auto* r = m->GetReflection();
    switch (field->cpp_type()) {
      case F::CPPTYPE_UINT64: r->AddUInt64(m, field, Next()); break;
      case F::CPPTYPE_INT64: r->AddInt64(m, field, Next()); break;
      case F::CPPTYPE_STRING: r->AddString(m, field, Text(field)); break;
      default: break;
    }
  }

  int counter_ = 0;
};

}  // namespace everstep::testing
