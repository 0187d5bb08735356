// Stand-in for the Ascend C header of the same name: what a kernel includes. Runs on a CPU and
// checks the rules of an Atlas A2 vector core; README.md lists what it offers.
#pragma once
#include "types.h"

#include "tensor.h"

#include "queue.h"

#include "copy.h"

#include "vector.h"

#include "cast.h"

#include "reduce.h"

#include "rearrange.h"

#include "choose.h"

#include "sync.h"
