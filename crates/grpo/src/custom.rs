//! Custom policy terms: functions of ratio and log-probability that also compute their derivatives.

use std::ops::{Add, Div, Mul, Neg, Sub};

/// Number with its derivatives with respect to the ratio and the log-probability of a token (a dual number with two directions).
///
/// Arithmetic on these numbers and plain numbers follows the rules of differentiation, so a formula written with them also
/// computes its gradient.
///
/// ```
/// use omnigrpo_grpo::Dual;
///
/// let ratio = Dual::ratio(1.5);
/// let square = ratio * ratio - 1.0;
/// assert_eq!((square.value, square.d_ratio), (1.25, 3.0));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dual {
    pub value: f64,
    /// Derivative with respect to the token's ratio, with the log-probability fixed.
    pub d_ratio: f64,
    /// Derivative with respect to the token's log-probability, with the ratio fixed.
    pub d_logp: f64,
}

impl Dual {
    /// Creates a constant.
    pub fn constant(value: f64) -> Self {
        Self { value, d_ratio: 0.0, d_logp: 0.0 }
    }

    /// Creates the ratio variable, with a derivative of 1 with respect to itself.
    pub fn ratio(value: f64) -> Self {
        Self { value, d_ratio: 1.0, d_logp: 0.0 }
    }

    /// Creates the log-probability variable, with a derivative of 1 with respect to itself.
    pub fn logp(value: f64) -> Self {
        Self { value, d_ratio: 0.0, d_logp: 1.0 }
    }

    /// Applies a function, given its `value` and its derivative `slope` at this number.
    #[must_use]
    pub fn map(self, value: f64, slope: f64) -> Self {
        Self { value, d_ratio: slope * self.d_ratio, d_logp: slope * self.d_logp }
    }

    #[must_use]
    pub fn exp(self) -> Self {
        let value = self.value.exp();
        self.map(value, value)
    }

    #[must_use]
    pub fn ln(self) -> Self {
        self.map(self.value.ln(), 1.0 / self.value)
    }

    #[must_use]
    pub fn tanh(self) -> Self {
        let value = self.value.tanh();
        self.map(value, 1.0 - value * value)
    }

    /// Returns the smaller of two numbers; `self` if they are equal.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        if other.value < self.value { other } else { self }
    }

    /// Returns the larger of two numbers; `self` if they are equal.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        if other.value > self.value { other } else { self }
    }

    /// Clamps to both bounds. The derivatives are 0 outside them.
    #[must_use]
    pub fn clamp(self, low: f64, high: f64) -> Self {
        self.max(Self::constant(low)).min(Self::constant(high))
    }

    /// Drops the derivatives, like `detach` and `stopgrad` of other libraries.
    #[must_use]
    pub fn detach(self) -> Self {
        Self::constant(self.value)
    }
}

impl From<f64> for Dual {
    fn from(value: f64) -> Self {
        Self::constant(value)
    }
}

impl Neg for Dual {
    type Output = Self;

    fn neg(self) -> Self {
        self.map(-self.value, -1.0)
    }
}

impl<T: Into<Dual>> Add<T> for Dual {
    type Output = Self;

    fn add(self, other: T) -> Self {
        let other = other.into();
        Self {
            value: self.value + other.value,
            d_ratio: self.d_ratio + other.d_ratio,
            d_logp: self.d_logp + other.d_logp,
        }
    }
}

impl<T: Into<Dual>> Sub<T> for Dual {
    type Output = Self;

    fn sub(self, other: T) -> Self {
        self + -other.into()
    }
}

impl<T: Into<Dual>> Mul<T> for Dual {
    type Output = Self;

    fn mul(self, other: T) -> Self {
        let other = other.into();
        Self {
            value: self.value * other.value,
            d_ratio: self.d_ratio * other.value + self.value * other.d_ratio,
            d_logp: self.d_logp * other.value + self.value * other.d_logp,
        }
    }
}

impl<T: Into<Dual>> Div<T> for Dual {
    type Output = Self;

    fn div(self, other: T) -> Self {
        let other = other.into();
        let inverse = 1.0 / other.value;
        self * other.map(inverse, -inverse * inverse)
    }
}

/// Inputs of a custom policy term for one token.
#[derive(Debug, Clone, Copy)]
pub struct PolicyToken {
    /// Ratio of the probability under the current policy to that under the sampling policy; 1 in the first update.
    pub ratio: Dual,
    /// Log-probability under the current policy, in nats.
    pub logp: Dual,
    pub advantage: f64,
}

/// Custom policy term: the summand of one token. Smaller values are better, as in every loss.
///
/// It is a function pointer and cannot capture values. A plan therefore stays a plain value, and two runs with the same plan
/// compute the same loss.
#[derive(Clone, Copy)]
pub struct CustomTerm(pub fn(PolicyToken) -> Dual);

/// Formats the term without the function's address, which differs between processes.
impl std::fmt::Debug for CustomTerm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CustomTerm")
    }
}

impl PartialEq for CustomTerm {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::fn_addr_eq(self.0, other.0)
    }
}
