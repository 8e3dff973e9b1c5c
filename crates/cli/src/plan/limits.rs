//! Numbers of ranks up to which figures are computed.

/// The most ranks for which every step of every rank is written and drawn, up to 5 MB of each.
pub(super) const MOST_DETAILED_RANKS: usize = 128;

/// The most ranks for which steps are written and drawn, and for which all strategies are compared.
/// Steps take O(ranks²) memory, all other figures O(ranks).
pub(super) const MOST_STEPPED_RANKS: usize = 256;
