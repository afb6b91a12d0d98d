// The boundary between C++ and the C interface, which no exception crosses.
//
// Working memory is allocated where it is needed, so std::bad_alloc can be thrown anywhere below an exported function.
// No exception leaves a parallel region, either: parallel_for throws std::bad_alloc in the calling thread instead.
#pragma once
#include <new>
#include <stdexcept>

#include "freight.h"

namespace freight {

// Run body(); returns FREIGHT_OK, or the status of its exception.
template <class Body>
FreightStatus status_of(const Body& body) noexcept {
  try {
    body();
    return FREIGHT_OK;
  } catch (const std::bad_alloc&) {
    return FREIGHT_OUT_OF_MEMORY;
  } catch (const std::length_error&) {  // a vector longer than any address space
    return FREIGHT_OUT_OF_MEMORY;
  } catch (...) {  // std::system_error: the pool got no thread
    return FREIGHT_FAILED;
  }
}

}  // namespace freight
