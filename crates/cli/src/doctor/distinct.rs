//! Findings of all ranks, with one line for each distinct one.

use std::collections::HashMap;

use super::process::Finding;

/// Most runs of ranks in a line.
const MOST_RUNS: usize = 6;

/// Merges the findings of every rank. Equal ones become one, which names its ranks unless all have
/// it. Names stay in the order of their first finding.
pub(super) fn distinct(of_ranks: &[Vec<Finding>]) -> Vec<Finding> {
    let mut found: Vec<(&Finding, Vec<usize>)> = Vec::new();
    let mut indices: HashMap<&Finding, usize> = HashMap::new();
    let mut names: Vec<&str> = Vec::new();
    for (rank, findings) in of_ranks.iter().enumerate() {
        for finding in findings {
            let index = *indices.entry(finding).or_insert(found.len());
            if index == found.len() {
                found.push((finding, Vec::new()));
            }
            if found[index].1.last() != Some(&rank) {
                found[index].1.push(rank);
            }
            if !names.contains(&finding.0.as_str()) {
                names.push(&finding.0);
            }
        }
    }
    let all = of_ranks.len();
    let of_name = |name: &&str| {
        let named = found.iter().filter(move |(finding, _)| finding.0 == *name);
        named
            .map(|((name, what), ranks)| {
                let of = if ranks.len() == all {
                    String::new()
                } else {
                    format!(" ({})", listed(ranks))
                };
                (name.clone(), format!("{what}{of}"))
            })
            .collect::<Vec<Finding>>()
    };
    names.iter().flat_map(of_name).collect()
}

/// Formats ascending ranks: as runs, `rank 3`, `ranks 0-7,9`, or with a constant distance,
/// `ranks 0-8184 by 8`.
fn listed(ranks: &[usize]) -> String {
    let &[first, .., last] = ranks else {
        return ranks.first().map_or_else(String::new, |rank| format!("rank {rank}"));
    };
    let distance = ranks[1] - first;
    if distance > 1 && ranks.len() > 2 && ranks.windows(2).all(|pair| pair[1] - pair[0] == distance)
    {
        return format!("ranks {first}-{last} by {distance}");
    }
    let runs: Vec<String> = ranks
        .chunk_by(|before, next| before + 1 == *next)
        .map(|run| match (run[0], run[run.len() - 1]) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}-{last}"),
        })
        .collect();
    if runs.len() > MOST_RUNS {
        return format!("{} ranks: {}, …", ranks.len(), runs[..MOST_RUNS].join(","));
    }
    format!("ranks {}", runs.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_in_a_few_words() {
        assert_eq!(listed(&[3]), "rank 3");
        assert_eq!(listed(&[3, 5]), "ranks 3,5");
        assert_eq!(listed(&[0, 1, 2, 7, 9, 10]), "ranks 0-2,7,9-10");
        let by_eight: Vec<usize> = (0..1024).map(|node| 8 * node).collect();
        assert_eq!(listed(&by_eight), "ranks 0-8184 by 8");
        let odd: Vec<usize> = (0..100).map(|rank| rank * rank).collect();
        assert_eq!(listed(&odd), "100 ranks: 0-1,4,9,16,25,36, …");
    }

    /// Thousands of ranks on nodes of eight, one of which lacks memory: one line a finding.
    #[test]
    fn thousands_of_ranks_have_one_line_for_each_distinct_finding() {
        let finding = |name: &str, what: String| (name.to_owned(), what);
        let of_rank = |rank: usize| {
            let mut findings = vec![
                finding("cores", format!("{}", rank % 8)),
                finding("descriptors", "1024".to_owned()),
            ];
            if rank / 8 == 100 {
                findings.push(finding("warning", "little memory".to_owned()));
            }
            findings
        };
        let all: Vec<Vec<Finding>> = (0..8192).map(of_rank).collect();
        let lines = distinct(&all);
        assert_eq!(lines.len(), 8 + 1 + 1);
        assert_eq!(lines[1], finding("cores", "1 (ranks 1-8185 by 8)".to_owned()));
        assert_eq!(lines[8], finding("descriptors", "1024".to_owned()));
        assert_eq!(lines[9], finding("warning", "little memory (ranks 800-807)".to_owned()));
    }
}
