//! Small matrix products with a summation order fixed by the inner dimension alone.
