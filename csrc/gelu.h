// GELU (Hendrycks and Gimpel 2016) by the error function: x / 2 * (1 + erf(x / sqrt(2))).
#pragma once
#include "vec.h"

namespace freight {

// erfc(z) for z >= 0 is t * e^(-z^2 + p(t)), t = 1 / (1 + z / 2), within 1.2e-7 of itself (Press et al., "Numerical
// Recipes", 6.2). Half of that at z = |x| / sqrt(2) is the factor of x < 0, and 1 minus it that of x >= 0.
inline VF gelu(VF x) {
  constexpr float kOfP[] = {0.17087277f,  -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                            -0.18628806f, 0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  const VF magnitude = (VF)((VI)x & 0x7FFFFFFF);
  const VF t = set1(1.f) / fma(magnitude, set1(0.353553391f), set1(1.f));
  VF p = set1(kOfP[0]);
  for (int i = 1; i < 10; i++) p = fma(p, t, set1(kOfP[i]));
  const VF tail = set1(0.5f) * t * exp2(fma(x * x, set1(-0.72134752f), p * set1(1.44269504f)));
  return x * (x < VF{} ? tail : set1(1.f) - tail);
}

}  // namespace freight
