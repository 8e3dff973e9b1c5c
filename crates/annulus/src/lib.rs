//! annulus
