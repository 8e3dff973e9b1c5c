//! Names by pattern: `*` stands for any letters, `?` for one.

/// Whether all of `name` fits `pattern`.
pub(super) fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // after a star: where to go on if what follows it does not fit here
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
    use super::fits;

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
            assert!(fits(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in
            [("", "a"), ("causal", "causal2"), ("c?", "c"), ("*b", "abc"), ("a*b*c", "acb")]
        {
            assert!(!fits(pattern, name), "{pattern} {name}");
        }
    }
}
