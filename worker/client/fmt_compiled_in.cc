// The functions of fmt that the library calls, for libeverstep.so only: as everything else in there they stay hidden, so
// a program may bring any fmt of its own. -fkeep-inline-functions makes the compiler emit them.
#define FMT_HEADER_ONLY 1
#include <fmt/format.h>
