//! Findings about one process: limits, memory and devices on which a job of many ranks depends,
//! and those of all ranks, with one line for each distinct one.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::Path,
};

use rustix::process::{Resource, getrlimit};

/// Descriptors of a process besides those of its connections: `scripts/scale-check` runs 24 ranks
/// of 40 descriptors each over TCP, and each of these has 10 neighbours.
const OTHER_DESCRIPTORS: u64 = 30;
/// Least free shared memory of a node: an MPI maps a few MiB for each rank.
const LEAST_SHARED_MEMORY: u64 = 64 << 20;
/// Name of a finding that needs attention.
const WARNING: &str = "warning";

/// A name and a text.
pub(super) type Finding = (String, String);

/// Collects the findings about this process, one of `ranks`.
pub(super) fn findings(ranks: usize) -> Vec<Finding> {
    let sys = Path::new("/sys");
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let fabric = fabric(sys);
    let mut all = Vec::new();
    let mut line = |name: &str, what: String| all.push((name.to_owned(), what));
    if let Some(cores) = field(&status, "Cpus_allowed_list") {
        line("cores", cores.to_owned());
    }
    if let Some(numa) = numa(sys, &status) {
        line("numa", numa);
    }
    if let Some(gpus) = gpus(sys) {
        line("gpu binding", gpus);
    }
    let rails = if fabric.is_empty() { interfaces(sys) } else { fabric.clone() };
    line("rails", if rails.is_empty() { "none found".to_owned() } else { rails.join(", ") });
    let more = [
        descriptors(getrlimit(Resource::Nofile).current, ranks),
        memlock(getrlimit(Resource::Memlock).current, !fabric.is_empty()),
        shared_memory(free_bytes("/dev/shm")),
    ];
    more.into_iter().flatten().for_each(|(name, what)| line(name, what));
    all
}

/// Returns the value of a line `name: value`.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    let value = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':').map(str::trim);
    status.lines().find_map(value)
}

type NamedTexts = Vec<(&'static str, String)>;

/// Compares the limit of file descriptors with the connections of a rank.
fn descriptors(limit: Option<u64>, ranks: usize) -> NamedTexts {
    let neighbours = 2 * u64::from(ranks.next_power_of_two().trailing_zeros());
    let needed = neighbours + OTHER_DESCRIPTORS;
    let connections = format!("connections to at most {neighbours} neighbours");
    let Some(limit) = limit else {
        return vec![("descriptors", format!("unlimited; {connections}"))];
    };
    let found = ("descriptors", format!("{limit}; {connections}"));
    let warning = (
        WARNING,
        format!("{limit} descriptors are few for {neighbours} connections: ulimit -n {needed}"),
    );
    if limit < needed { vec![found, warning] } else { vec![found] }
}

/// Returns the limit of locked memory, which a fabric's driver registers.
fn memlock(limit: Option<u64>, has_fabric: bool) -> NamedTexts {
    let Some(limit) = limit else { return vec![("memlock", "unlimited".to_owned())] };
    let found = ("memlock", format!("{} KiB", limit >> 10));
    let advice = "the fabric registers memory, of which little may be locked: ulimit -l unlimited";
    if has_fabric { vec![found, (WARNING, advice.to_owned())] } else { vec![found] }
}

/// Judges the free bytes of `/dev/shm`, through which the ranks of a node send. The amount itself
/// differs between nodes and moments.
fn shared_memory(free: Option<u64>) -> NamedTexts {
    match free {
        None => vec![("/dev/shm", "not found".to_owned())],
        Some(free) if free < LEAST_SHARED_MEMORY => {
            let what = format!("/dev/shm has less than {} MiB free", LEAST_SHARED_MEMORY >> 20);
            vec![(WARNING, what)]
        }
        Some(_) => {
            vec![("/dev/shm", format!("at least {} MiB free", LEAST_SHARED_MEMORY >> 20))]
        }
    }
}

fn free_bytes(folder: &str) -> Option<u64> {
    let system = rustix::fs::statvfs(folder).ok()?;
    Some(system.f_bavail.saturating_mul(system.f_frsize))
}

/// Returns the NUMA nodes on whose cores and in whose memory this process may be.
fn numa(sys: &Path, status: &str) -> Option<String> {
    let own = numbers(field(status, "Cpus_allowed_list")?)?;
    let mut nodes = Vec::new();
    for node in names(&sys.join("devices/system/node"), "node") {
        let list = sys.join("devices/system/node").join(&node).join("cpulist");
        let of_node = numbers(fs::read_to_string(list).ok()?.trim())?;
        if of_node.iter().any(|core| own.contains(core)) {
            nodes.push(node.trim_start_matches("node").parse::<usize>().ok()?);
        }
    }
    nodes.sort_unstable();
    let nodes: Vec<String> = nodes.iter().map(usize::to_string).collect();
    let memory = field(status, "Mems_allowed_list").unwrap_or("unknown");
    (!nodes.is_empty()).then(|| format!("cores of {}, memory of {memory}", nodes.join(",")))
}

/// Returns the numbers of a list as `0-3,8`; `None` if it is malformed.
fn numbers(list: &str) -> Option<Vec<usize>> {
    let run = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
    };
    let runs = list.split(',').filter(|run| !run.is_empty()).map(run);
    Some(runs.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
}

/// Returns the GPUs of this node by NUMA node, and the variables that select some; `None` without a
/// GPU.
fn gpus(sys: &Path) -> Option<String> {
    let devices = sys.join("bus/pci/devices");
    let mut by_node: BTreeMap<String, usize> = BTreeMap::new();
    for device in names(&devices, "") {
        let read = |name: &str| {
            let text = fs::read_to_string(devices.join(&device).join(name)).unwrap_or_default();
            text.trim().to_owned()
        };
        // display and 3D controllers of AMD, NVIDIA and Intel
        let is_gpu = ["0x0300", "0x0302", "0x0380"].iter().any(|of| read("class").starts_with(of));
        if is_gpu && ["0x1002", "0x10de", "0x8086"].contains(&read("vendor").as_str()) {
            *by_node.entry(read("numa_node")).or_default() += 1;
        }
    }
    // Linux reports -1 for a device of which the firmware gives no node
    let at = |node: &str| match node {
        "-1" | "" => "no numa node".to_owned(),
        node => format!("numa node {node}"),
    };
    let counts: Vec<String> =
        by_node.iter().map(|(node, count)| format!("{count} at {}", at(node))).collect();
    let variables = ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"];
    let set = |name: &str| std::env::var(name).ok().map(|value| format!("{name}={value}"));
    let selected: Vec<String> = variables.into_iter().filter_map(set).collect();
    let selected = if selected.is_empty() { "all visible".to_owned() } else { selected.join(" ") };
    (!counts.is_empty()).then(|| format!("{}; {selected}", counts.join(", ")))
}

/// Returns the ports of fabrics (InfiniBand, RoCE, Omni-Path, Slingshot) with their rates.
fn fabric(sys: &Path) -> Vec<String> {
    let folder = sys.join("class/infiniband");
    let port = |name: String| {
        let rate = fs::read_to_string(folder.join(&name).join("ports/1/rate"));
        rate.map_or_else(|_| name.clone(), |rate| format!("{name} ({})", rate.trim()))
    };
    let ports = names(&folder, "").into_iter().map(port);
    ports.chain(names(&sys.join("class/cxi"), "")).collect()
}

/// Returns the network interfaces that are up, with their rates.
fn interfaces(sys: &Path) -> Vec<String> {
    let folder = sys.join("class/net");
    let interface = |name: String| {
        let read = |file: &str| fs::read_to_string(folder.join(&name).join(file)).ok();
        let is_up = read("operstate").is_some_and(|state| state.trim() == "up");
        // interfaces without a rate report an error or -1
        let rate = read("speed").and_then(|rate| rate.trim().parse::<u32>().ok());
        let rate = rate.map_or_else(String::new, |rate| format!(" ({rate} Mb/s)"));
        (is_up && name != "lo").then(|| format!("{name}{rate}"))
    };
    names(&folder, "").into_iter().filter_map(interface).collect()
}

/// Returns the names in a folder that begin with `prefix` and, if it has one, end with a number;
/// ascending.
fn names(folder: &Path, prefix: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_numbered = |name: &String| {
        name.strip_prefix(prefix)
            .is_some_and(|rest| prefix.is_empty() || rest.parse::<usize>().is_ok())
    };
    let mut names: Vec<String> = names.filter(is_numbered).collect();
    names.sort_unstable();
    names
}

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
    found.sort_by_key(|((of, _), _)| names.iter().position(|name| name == of));
    let in_words = |((name, what), ranks): &(&Finding, Vec<usize>)| match ranks.len() {
        all if all == of_ranks.len() => (name.clone(), what.clone()),
        _ => (name.clone(), format!("{what} ({})", listed(ranks))),
    };
    found.iter().map(in_words).collect()
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
    fn descriptors_are_compared_with_the_neighbours_of_a_rank() {
        let lines = |limit, ranks| -> Vec<&str> {
            descriptors(limit, ranks).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(lines(Some(1024), 8192), ["descriptors"]);
        assert_eq!(lines(Some(40), 24), ["descriptors"]);
        assert_eq!(lines(Some(40), 64), ["descriptors", WARNING]);
        assert_eq!(lines(None, 1 << 20), ["descriptors"]);
        assert!(descriptors(Some(40), 64)[1].1.ends_with("12 connections: ulimit -n 42"));
        assert_eq!(descriptors(Some(40), 1).len(), 1);
    }

    #[test]
    fn locked_and_shared_memory_are_judged() {
        assert_eq!(memlock(None, true), [("memlock", "unlimited".to_owned())]);
        assert_eq!(memlock(Some(65_536), false), [("memlock", "64 KiB".to_owned())]);
        assert_eq!(memlock(Some(65_536), true)[1].0, WARNING);
        assert_eq!(shared_memory(Some(1 << 30))[0].0, "/dev/shm");
        assert_eq!(shared_memory(Some(1 << 20))[0].0, WARNING);
        assert_eq!(shared_memory(None)[0].1, "not found");
    }

    #[test]
    fn devices_are_read_from_the_tree_of_the_system() {
        let root = std::env::temp_dir().join(format!("annulus-sys-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("devices/system/node/node0/cpulist", "0-3\n");
        write("devices/system/node/node1/cpulist", "4-7\n");
        write("devices/system/node/online", "0-1\n");
        write("class/net/lo/operstate", "unknown\n");
        write("class/net/eth0/operstate", "up\n");
        write("class/net/eth0/speed", "25000\n");
        write("class/net/eth1/operstate", "down\n");
        write("class/net/veth/operstate", "up\n");
        for (device, class, node) in [
            ("a", "0x030200", "0"),
            ("b", "0x030000", "1"),
            ("c", "0x020000", "0"),
            ("d", "0x030200", "-1"),
        ] {
            write(&format!("bus/pci/devices/{device}/class"), class);
            write(&format!("bus/pci/devices/{device}/vendor"), "0x10de\n");
            write(&format!("bus/pci/devices/{device}/numa_node"), &format!("{node}\n"));
        }
        let status = "Name:\tx\nCpus_allowed_list:\t2-5\nMems_allowed_list:\t0\n";
        assert_eq!(numa(&root, status).unwrap(), "cores of 0,1, memory of 0");
        assert_eq!(numa(&root, "Cpus_allowed_list:\t9\n"), None);
        assert_eq!(interfaces(&root), ["eth0 (25000 Mb/s)", "veth"]);
        assert_eq!(fabric(&root), [""; 0]);
        write("class/infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)\n");
        assert_eq!(fabric(&root), ["mlx5_0 (200 Gb/sec (4X HDR))"]);
        let found = gpus(&root).unwrap();
        let wanted = "1 at no numa node, 1 at numa node 0, 1 at numa node 1; ";
        assert!(found.starts_with(wanted), "{found}");
        fs::remove_dir_all(&root).unwrap();
    }

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
