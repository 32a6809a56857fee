// Which tiers were built in and which of them this CPU (and its operating system) runs.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace ft {

// Slowest first, behind those that no hardware has run. The last is the default.
const std::vector<const TierKernels*>& tiers();
std::string tier_names();
// Null if there is none of that index.
const TierKernels* tier_at(int index);

}  // namespace ft
