#include "proto/model/lineage.h"

#include <utility>

#include "proto/base/check.h"

namespace everstep {

void Lineage::Append(ChainLink link) {
  EVERSTEP_CHECK(link.start.value >= 0);
  EVERSTEP_CHECK(links_.empty() || links_.back().generation < link.generation);
  while (!links_.empty() && links_.back().start >= link.start) links_.pop_back();
  links_.push_back(link);
}

bool Lineage::OnChain(StateId id) const {
  if (id.step.value == 0) return true;
  for (size_t i = 0; i < links_.size(); ++i) {
    if (links_[i].generation != id.generation) continue;
    return id.step > links_[i].start && (i + 1 == links_.size() || id.step <= links_[i + 1].start);
  }
  return false;
}

StateId Lineage::AtStep(Step step) const {
  if (step.value == 0) return {};
  for (size_t i = links_.size(); i-- > 0;) {
    if (links_[i].start < step) return {step, links_[i].generation};
  }
  EVERSTEP_CHECK(false && "no generation reaches this step");
  return {};
}

Lineage Lineage::FromLinks(std::vector<ChainLink> links) {
  Lineage lineage;
  for (ChainLink& link : links) lineage.Append(std::move(link));
  return lineage;
}

}  // namespace everstep
