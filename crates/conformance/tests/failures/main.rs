//! Ranks, messages, devices and updates that fail or are late. A program of its own, because its
//! deadlines are short beside the computations of the suite.

mod faults;
mod slow_ranks;
mod update;
