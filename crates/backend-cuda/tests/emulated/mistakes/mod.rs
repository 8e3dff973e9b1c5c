//! Mistakes planted in the kernels, each of which a check must find: one that it misses in the
//! table would be missed in the kernels, too.
//!
//! A mistake is one or more edits of the kernels' text. All mistakes of a family are compiled into
//! one program, because a program for each would take minutes: `planted(N)` of
//! `kernels/primitives_host.h` chooses at run time between the edited text and the original. A text
//! to edit that does not occur exactly once in its file is an error, which names both.

/// Lists mistakes: the case, perhaps with early copies, what is wrong and the sign; then of each
/// edit the file, the text and the text in its place.
macro_rules! mistakes {
    (@of early $of:ident, $what:literal, $sign:expr, $edits:expr) => {
        Mistake { early_copies: true, ..mistakes!(@of $of, $what, $sign, $edits) }
    };
    (@of $of:ident, $what:literal, $sign:expr, $edits:expr) => {
        Mistake { of: Of::$of, what: $what, sign: $sign, early_copies: false, edits: $edits }
    };
    ($($($of:ident)+: $what:literal, $sign:expr =>
        $($file:ident: $from:expr => $to:literal),+;)*) => {
        &[$(mistakes!(
            @of $($of)+, $what, $sign, const { &[$(Edit { file: $file, from: $from, to: $to }),+] }
        )),*]
    };
}

mod edits;
mod general;
mod mfma;
mod warpgroup;

use annulus_cuda::SourceEdit;
use annulus_cuda_emulator as emulator;

use crate::support::with_seed;
pub(crate) use edits::Edit;

/// Signs of a mistake besides the first array with a wrong element (`out[`, `dq[` …): a failed
/// launch or a deadlock.
pub(crate) const FAILED: &str = "CUDA_ERROR_LAUNCH_FAILED";
pub(crate) const DEADLOCK: &str = "deadlock";

/// Cases, by the code that they execute or the property that shows a mistake. Each check has its
/// own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    /// So many tiles that the stages of a pipeline are used again.
    Stages,
    /// So few pairs that one more visible key changes the result.
    FewPairs,
    /// A masked key that is not finite.
    MaskedNan,
    /// Tiles of queries with different numbers of tiles of keys.
    Stairs,
    /// Full tiles only.
    Full,
    /// Tiles of queries that attend to nothing.
    MostlyEmpty,
    /// A pass over several KV blocks.
    State,
}

/// A planted mistake.
pub(crate) struct Mistake {
    of: Of,
    what: &'static str,
    /// Part of the message of the failure.
    sign: &'static str,
    /// True if only copies that complete when they are issued show it: one warp then runs ahead.
    early_copies: bool,
    edits: &'static [Edit],
}

/// Edited kernels, and the mistake that a device plants.
#[derive(Clone, Copy)]
pub(crate) struct Planted {
    edit: SourceEdit,
    number: u32,
}

impl Planted {
    pub(crate) const fn edit(self) -> SourceEdit {
        self.edit
    }

    /// Plants the mistake in the launches of device `ordinal`; the next device may have another.
    pub(crate) fn plant(self, ordinal: usize) {
        emulator::plant(ordinal, self.number);
    }
}

/// Verdict on the case `of` with a planted mistake.
type Verdict = fn(Of, Planted) -> Result<(), String>;

/// A configuration of kernels in which mistakes are planted.
struct Check {
    name: &'static str,
    /// Sign of a mistake here; `None` if these kernels do not have it, or no case shows it.
    sign: fn(&Mistake) -> Option<&'static str>,
    verdict: Verdict,
    /// Seeds of the order of threads, blocks and copies: a mistake must show in one of them.
    seeds: std::ops::Range<u64>,
}

/// The seed of devices for which none is chosen.
const DEFAULT_ORDER: std::ops::Range<u64> = emulator::DEFAULT_SEED..emulator::DEFAULT_SEED + 1;

/// Mistakes, and the checks that find them.
pub(crate) struct Table {
    checks: &'static [Check],
    mistakes: &'static [Mistake],
}

/// Tables of mistakes that are compiled into the same programs.
pub(crate) struct Family {
    tables: &'static [&'static Table],
    edit: SourceEdit,
}

impl Family {
    fn mistakes(&self) -> impl Iterator<Item = &'static Mistake> {
        self.tables.iter().flat_map(|table| table.mistakes)
    }

    /// The kernels with `mistake` planted, or with none.
    fn planted(&self, mistake: Option<&Mistake>, early_copies: bool) -> Planted {
        let is_same =
            |(_, other): &(u32, &Mistake)| mistake.is_some_and(|m| std::ptr::eq(m, *other));
        let number = (1..).zip(self.mistakes()).find(is_same).map_or(0, |(number, _)| number);
        let early = if early_copies { emulator::EARLY_COPIES } else { 0 };
        Planted { edit: self.edit, number: number | early }
    }

    /// Requires that the checks of a table pass without a mistake, and that each mistake is found.
    fn catch(&self, table: &Table) {
        let mut wrong = Vec::new();
        for check in table.checks {
            let name = check.name;
            let own = || table.mistakes.iter().filter(|mistake| (check.sign)(mistake).is_some());
            let without = |own: &Mistake| {
                let planted = self.planted(None, own.early_copies);
                with_seed(check.seeds.start, || (check.verdict)(own.of, planted)).err()
            };
            let mut cases: Vec<&Mistake> = own().collect();
            cases.dedup_by_key(|own| (own.of, own.early_copies));
            if let Some(found) = cases.into_iter().find_map(without) {
                wrong.push(format!("{name}, without a mistake: {found}"));
                continue;
            }
            for mistake in own() {
                let planted = self.planted(Some(mistake), mistake.early_copies);
                let sign = (check.sign)(mistake).unwrap_or_default();
                let mut found = Vec::new();
                let is_caught = check.seeds.clone().any(|seed| {
                    let verdict = with_seed(seed, || (check.verdict)(mistake.of, planted));
                    found.extend(verdict.err());
                    found.last().is_some_and(|found| found.contains(sign))
                });
                if !is_caught {
                    wrong.push(format!("{name}: {}: {found:?}, not {sign}", mistake.what));
                }
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}

/// Declares a family, and a test for each of its tables: so no mistake is without one.
macro_rules! family {
    ($family:ident: $($test:ident => $table:path,)*) => {
        pub(crate) static $family: Family = Family {
            tables: &[$(&$table),*],
            edit: |file, text| edits::apply($family.mistakes(), file, text),
        };
        $(#[test]
        fn $test() {
            $family.catch(&$table);
        })*
    };
}

family! { WARPGROUP:
    mistakes_in_stages_and_products_are_caught => warpgroup::STAGES,
    mistakes_of_the_scheduler_and_of_outputs_are_caught => warpgroup::SCHEDULER,
    mistakes_in_backward_are_caught => warpgroup::BACKWARD,
}

family! { GENERAL:
    mistakes_at_level_plain_are_caught => general::PLAIN,
    mistakes_in_forward_on_tensor_cores_are_caught => general::FORWARD,
    mistakes_with_few_rows_are_caught => general::DECODE,
    mistakes_in_backward_on_tensor_cores_are_caught => general::BACKWARD,
    mistakes_in_the_merge_are_caught => general::MERGE,
}

family! { MFMA:
    mistakes_in_forward_on_matrix_cores_are_caught => mfma::FORWARD,
    mistakes_in_backward_on_matrix_cores_are_caught => mfma::BACKWARD,
    mistakes_with_few_rows_on_matrix_cores_are_caught => mfma::DECODE,
}

/// A mistake of a table without a check for it would be compiled in, and never run.
#[test]
fn every_mistake_has_a_check() {
    for table in [&WARPGROUP, &GENERAL, &MFMA].into_iter().flat_map(|family| family.tables) {
        for mistake in table.mistakes {
            let is_checked = table.checks.iter().any(|check| (check.sign)(mistake).is_some());
            assert!(is_checked && !mistake.edits.is_empty(), "{}", mistake.what);
        }
    }
}
