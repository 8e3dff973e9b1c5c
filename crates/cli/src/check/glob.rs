//! Patterns of names: `*` matches any characters, `?` matches one.

/// True if `pattern` matches the whole of `name`. Backtracks to the last `*` only, so the time is
/// O(pattern length · name length).
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // (pattern index after the last `*`, name index at which its match ended)
    let mut retry = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                p += 1;
                retry = Some((p, n));
            }
            Some(&letter) if letter == '?' || letter == name[n] => (p, n) = (p + 1, n + 1),
            _ => match &mut retry {
                Some((after, from)) => {
                    *from += 1;
                    (p, n) = (*after, *from);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&letter| letter == '*')
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns() {
        for (pattern, name) in [
            ("*", ""),
            ("*", "causal"),
            ("ca*al", "causal"),
            ("c?usal", "causal"),
            ("*_gqa*", "mask_causal_gqa"),
            ("a*b*c", "abbbc"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in
            [("", "a"), ("causal", "causal2"), ("c?", "c"), ("*b", "abc"), ("a*b*c", "acb")]
        {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }
}
