// Stands in for CANN's header of this name.
#pragma once
using aclrtStream = void *;
