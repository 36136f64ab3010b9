//! A policy term of one's own: a function of ratio and log-probability that carries its derivatives along.

use std::ops::{Add, Div, Mul, Neg, Sub};

/// A number with its derivatives by the ratio and by the log-probability of a token (a dual number of two directions).
///
/// Arithmetic between two of them, and with plain numbers, follows the rules of derivatives, so a formula written with it is
/// its own gradient.
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
    /// The number.
    pub value: f64,
    /// Derivative by the token's ratio, with the log-probability held.
    pub d_ratio: f64,
    /// Derivative by the token's log-probability, with the ratio held.
    pub d_logp: f64,
}

impl Dual {
    /// A constant.
    #[must_use]
    pub fn constant(value: f64) -> Self {
        Self { value, d_ratio: 0.0, d_logp: 0.0 }
    }

    /// The ratio itself.
    #[must_use]
    pub fn ratio(value: f64) -> Self {
        Self { value, d_ratio: 1.0, d_logp: 0.0 }
    }

    /// The log-probability itself.
    #[must_use]
    pub fn logp(value: f64) -> Self {
        Self { value, d_ratio: 0.0, d_logp: 1.0 }
    }

    /// `f` of this number, where `slope` is the derivative of `f` there.
    #[must_use]
    pub fn map(self, value: f64, slope: f64) -> Self {
        Self { value, d_ratio: slope * self.d_ratio, d_logp: slope * self.d_logp }
    }

    /// e to this power.
    #[must_use]
    pub fn exp(self) -> Self {
        let value = self.value.exp();
        self.map(value, value)
    }

    /// The natural logarithm.
    #[must_use]
    pub fn ln(self) -> Self {
        self.map(self.value.ln(), 1.0 / self.value)
    }

    /// The hyperbolic tangent.
    #[must_use]
    pub fn tanh(self) -> Self {
        let value = self.value.tanh();
        self.map(value, 1.0 - value * value)
    }

    /// The smaller of two; of equal ones this.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        if other.value < self.value { other } else { self }
    }

    /// The larger of two; of equal ones this.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        if other.value > self.value { other } else { self }
    }

    /// Bounded from both sides; the derivative is 0 beyond them.
    #[must_use]
    pub fn clamp(self, low: f64, high: f64) -> Self {
        self.max(Self::constant(low)).min(Self::constant(high))
    }

    /// The number without its derivatives, as `detach` and `stopgrad` of other libraries.
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

/// Numbers of a token that a custom policy term reads.
#[derive(Debug, Clone, Copy)]
pub struct PolicyToken {
    /// Probability under the current policy over that under the one that sampled; 1 in the first update.
    pub ratio: Dual,
    /// Log-probability under the current policy, in nats.
    pub logp: Dual,
    /// Advantage of its completion.
    pub advantage: f64,
}

/// A policy term of one's own, the summand of one token: smaller is better, as every loss.
///
/// A function and not a closure that captures, so that a plan stays a plain value: two runs with the same plan do the same.
#[derive(Clone, Copy)]
pub struct CustomTerm(pub fn(PolicyToken) -> Dual);

/// Without the address, which another process has elsewhere.
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
