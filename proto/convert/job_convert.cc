#include "proto/convert/job_convert.h"

#include "proto/convert/reader.h"
#include "proto/convert/shapes.h"

namespace everstep {

v1::JobSpec ToMessage(const JobSpec& spec) {
  v1::JobSpec out;
  shapes::WriteJobSpec(spec, &out);
  return out;
}

Result<JobSpec> FromMessage(const v1::JobSpec& message) {
  Reader reader;
  JobSpec spec = shapes::ReadJobSpec(reader, message);
  if (!reader.ok()) return reader.status();
  return spec;
}

JobSpec FromMessage(const v1::JobSpec& message, std::vector<std::string>* problems) {
  Reader reader;
  JobSpec spec = shapes::ReadJobSpec(reader, message);
  *problems = reader.problems();
  return spec;
}

}  // namespace everstep
