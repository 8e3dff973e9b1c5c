//! Words that describe a grid: how it divides heads, queries and keys, and the parts of its passes.

use super::strategies::PassBytes;
use crate::report::{bytes, counted};

/// Describes a division of all ranks into parts of heads, queries and keys in one line.
pub(super) fn division_in_words(name: &str, [heads, queries, columns]: [usize; 3]) -> String {
    let members = heads * columns;
    let groups = counted(queries as u64, "group", "groups");
    let divided = match (heads, columns) {
        (_, 1) => "heads are".to_owned(),
        (1, _) => "keys are".to_owned(),
        _ => format!("heads, and keys in {columns} columns, are"),
    };
    format!("{name}: {divided} divided among {members} ranks; a ring over {groups}")
}

/// Describes the exchanges of each pass, and the rings between them: of a forward pass, then of a
/// backward pass.
pub(super) fn passes_in_words(
    [heads, queries, columns]: [usize; 3],
    passes: &[PassBytes],
) -> Vec<[String; 3]> {
    let members = heads * columns;
    let [kv, gradients] = if heads > 1 { [", k, v", ", dk, dv"] } else { ["", ""] };
    let merged = |parts: &str| match columns {
        1 => String::new(),
        _ => format!(", parts of {parts} merged"),
    };
    let rings = |of: &PassBytes| match queries {
        1 => "tiles of each rank; nothing circulates".to_owned(),
        _ => format!(
            "{} over {}: {}",
            counted(members as u64, "ring", "rings"),
            counted(queries as u64, "group", "groups"),
            bytes(of.rings)
        ),
    };
    let pass = |name: &str, of: &PassBytes, inputs: String, results: String, parts: &str| {
        [
            format!("{name}: {inputs} exchanged, {}", bytes(of.before)),
            rings(of),
            format!("{results} exchanged, {}{}", bytes(of.after), merged(parts)),
        ]
    };
    let of_backward = if columns > 1 { "lse, dout, −delta" } else { "out, lse, dout, dlse" };
    let in_words = |(index, of): (usize, &PassBytes)| match index {
        0 => pass("forward", of, format!("q{kv}"), "out, lse".to_owned(), "out"),
        _ => pass("backward", of, format!("q{kv}, {of_backward}"), format!("dq{gradients}"), "dq"),
    };
    passes.iter().enumerate().map(in_words).collect()
}
