// A small readable page of the cluster, made from the view. Thread-safe: a pure function.
#pragma once

#include <string>

#include "controller/core/view/view.h"
#include "proto/base/time.h"

namespace everstep {

std::string StatusPage(const ClusterView& view, WallTime now);
// `text` for HTML: nothing in it can become markup.
std::string HtmlEscaped(std::string_view text);

}  // namespace everstep
