//! Parts go to the disk as they come, are read under any other cut, and take nothing with them that is not theirs.
use super::*;

fn simulation() -> Simulation {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.toml");
    let text = "name = \"a\"\nsteps = 9\n[grid]\nsize = [192, 40]\n[rule]\nname = \"d2q9\"\ntau = 1\n\
                [initial]\nvelocity = [\"0.01 * sin(x)\", \"0.01 * cos(y)\"]\n";
    fs::write(&path, text).unwrap();
    Simulation::read(&path).unwrap_or_else(|error| panic!("{error}"))
}

fn region(x: [usize; 2], y: [usize; 2]) -> Region {
    Region { start: [x[0], y[0], 0], end: [x[1], y[1], 1] }
}

fn cut() -> [Region; 3] {
    [region([0, 64], [0, 40]), region([64, 192], [0, 17]), region([64, 192], [17, 40])]
}

/// Writes a tile's part in pieces.
fn put(checkpoints: &mut Checkpoints, simulation: &Simulation, step: u32, region: Region) {
    let cells = simulation.initial(region, 1);
    let mut part = checkpoints.begin(step, region).unwrap();
    assert_eq!(part.expected(), cells.len() as u64);
    cells.chunks(1000).for_each(|piece| part.write(piece).unwrap());
    checkpoints.add(part.complete().unwrap());
}

fn whole(out: &Path, simulation: &Simulation, step: u32) -> Checkpoints {
    let mut checkpoints = Checkpoints::open(out, simulation).unwrap();
    cut().into_iter().for_each(|region| put(&mut checkpoints, simulation, step, region));
    checkpoints.keep(step, &cut()).unwrap();
    checkpoints
}

#[test]
fn a_checkpoint_is_read_in_blocks_under_any_cut() {
    let (out, simulation) = (tempfile::tempdir().unwrap(), simulation());
    let newest = whole(out.path(), &simulation, 3).newest(&simulation).unwrap();
    assert_eq!((newest.step, newest_step(out.path())), (3, Some(3)));
    for wanted in [simulation.grid().region(), region([0, 192], [9, 31]), region([64, 128], [3, 4]), cut()[1]] {
        let mut cells = Vec::new();
        newest
            .read(wanted, |block| {
                cells.extend_from_slice(&block);
                true
            })
            .unwrap();
        assert!(cells == simulation.initial(wanted, 1), "{wanted:?}");
    }
    let mut blocks = 0;
    newest
        .read(simulation.grid().region(), |_| {
            blocks += 1;
            false
        })
        .unwrap();
    assert_eq!(blocks, 1, "nothing more is read when it is not wanted");
    assert!(newest.read(region([0, 193], [0, 4]), |_| true).is_err());
    // A byte that is another is found before anything is gone on from.
    let file = out.path().join("checkpoints/step-3").join(file_name(cut()[0]));
    let mut bytes = fs::read(&file).unwrap();
    bytes[77] ^= 1;
    fs::write(&file, bytes).unwrap();
    let mut checkpoints = Checkpoints::open(out.path(), &simulation).unwrap();
    assert!(checkpoints.newest(&simulation).unwrap_err().contains("has changed"));
}

#[test]
fn an_owner_that_sends_more_or_less_leaves_nothing_on_the_disk() {
    let (out, simulation) = (tempfile::tempdir().unwrap(), simulation());
    let mut checkpoints = Checkpoints::open(out.path(), &simulation).unwrap();
    let mut part = checkpoints.begin(1, cut()[0]).unwrap();
    let more = vec![0; part.expected() as usize + 1];
    assert!(part.write(&more).unwrap_err().contains("sends more"));
    drop(part);
    let mut part = checkpoints.begin(1, cut()[0]).unwrap();
    part.write(&more[..7]).unwrap();
    assert!(part.complete().unwrap_err().contains("sent 7"));
    assert_eq!(written(out.path()), Vec::<PathBuf>::new());
    assert!(checkpoints.keep(1, &cut()).is_err());
}

#[test]
fn parts_of_other_cuts_and_older_checkpoints_go_and_files_of_others_stay() {
    let (out, simulation) = (tempfile::tempdir().unwrap(), simulation());
    let out = out.path();
    let mut checkpoints = Checkpoints::open(out, &simulation).unwrap();
    // Under a cut that a loss put an end to.
    put(&mut checkpoints, &simulation, 4, region([0, 192], [0, 20]));
    let folder = |step: u32| out.join(format!("checkpoints/step-{step}"));
    fs::write(folder(4).join("x0-192_y20-40_z0-1.cells.9.partial"), "half").unwrap();
    fs::write(folder(4).join("notes.txt"), "mine").unwrap();
    fs::create_dir_all(folder(7).join("deep")).unwrap();
    fs::write(folder(7).join("deep/file"), "mine").unwrap();
    cut().into_iter().for_each(|region| put(&mut checkpoints, &simulation, 4, region));
    checkpoints.keep(4, &cut()).unwrap();
    let named: BTreeSet<String> = cut().map(file_name).into_iter().chain([MANIFEST.to_owned()]).collect();
    assert_eq!(files(&folder(4)).into_iter().map(|(name, _)| name).collect::<BTreeSet<_>>(), named);
    assert!(folder(4).join("notes.txt").exists() && folder(7).join("deep/file").exists());
    // Parts of the next one are on their way while this one is kept.
    put(&mut checkpoints, &simulation, 8, cut()[0]);
    cut().into_iter().for_each(|region| put(&mut checkpoints, &simulation, 6, region));
    checkpoints.keep(6, &cut()).unwrap();
    assert_eq!(files(&folder(8)).len(), 1);
    cut()[1..].iter().for_each(|region| put(&mut checkpoints, &simulation, 8, *region));
    checkpoints.keep(8, &cut()).unwrap();
    assert!(files(&folder(4)).is_empty() && folder(4).join("notes.txt").exists());
    assert!(folder(6).exists() && folder(8).exists());
}

#[test]
fn only_names_of_parts_and_manifests_are_ours() {
    for name in ["manifest.json", "manifest.partial", "x0-64_y0-8_z0-1.cells", "x0-64_y0-8_z0-1.partial"] {
        assert!(is_ours(name), "{name}");
    }
    assert!(is_ours("x0-64_y0-8_z0-1.cells.12.partial"));
    for name in [
        "",
        "notes",
        "x0-64_y0-8.cells",
        "x0-64_y0-8_z0-a.cells",
        "a.cells",
        "x0-64_y0-8_z0-1.cells.bak",
        "x0-64_y0-8_z0-1",
    ] {
        assert!(!is_ours(name), "{name}");
    }
}
