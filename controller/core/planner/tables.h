// The device and model tables: rows compiled in from controller/planner_tables, to which a user's file adds rows or
// replaces those of the same name. Pure: parses text that somebody else read. Thread-compatible.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "controller/core/planner/model.h"
#include "proto/base/status.h"

namespace everstep::planner {

struct Tables {
  std::vector<DeviceModel> devices;       // in order of names
  std::vector<TransformerModel> models;   // in order of names

  const DeviceModel* FindDevice(std::string_view name) const;   // nullptr: unknown
  const TransformerModel* FindModel(std::string_view name) const;
};

const char* DeviceTableText();  // what was compiled in
const char* ModelTableText();

const Tables& BuiltInTables();

// kInvalidArgument: a row that lacks a column, a number that is none, a size out of bounds; names file and line.
Status AddDeviceRows(std::string_view csv, const std::string& file, Tables* tables);
Status AddModelRows(std::string_view csv, const std::string& file, Tables* tables);

}  // namespace everstep::planner
