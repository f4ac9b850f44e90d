//! Tests of checkpoints: parts are streamed to disk, read under any tiling, and files of others are not touched.
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
    checkpoints.complete(step, &cut()).unwrap();
    checkpoints
}

#[test]
fn a_checkpoint_is_read_in_blocks_under_any_tiling() {
    let (out, simulation) = (tempfile::tempdir().unwrap(), simulation());
    let newest = whole(out.path(), &simulation, 3).newest(&simulation).unwrap();
    assert_eq!((newest.step, newest_step(out.path())), (3, Some(3)));
    for asked in [simulation.grid().region(), region([0, 192], [9, 31]), region([64, 128], [3, 4]), cut()[1]] {
        let mut cells = Vec::new();
        newest
            .read(asked, |block| {
                cells.extend_from_slice(&block);
                true
            })
            .unwrap();
        assert!(cells == simulation.initial(asked, 1), "{asked:?}");
    }
    let mut blocks = 0;
    newest
        .read(simulation.grid().region(), |_| {
            blocks += 1;
            false
        })
        .unwrap();
    assert_eq!(blocks, 1, "reading stops when `each` returns false");
    assert!(newest.read(region([0, 193], [0, 4]), |_| true).is_err());
    // A changed byte is detected before the run resumes.
    let file = out.path().join("checkpoints/step-3").join(file_name(cut()[0]));
    let mut bytes = fs::read(&file).unwrap();
    bytes[77] ^= 1;
    fs::write(&file, bytes).unwrap();
    let mut checkpoints = Checkpoints::open(out.path(), &simulation).unwrap();
    assert!(checkpoints.newest(&simulation).unwrap_err().contains("has changed"));
}

#[test]
fn a_part_of_the_wrong_size_leaves_nothing_on_disk() {
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
    assert!(checkpoints.complete(1, &cut()).is_err());
}

#[test]
fn parts_of_other_tilings_and_old_checkpoints_are_removed_and_foreign_files_stay() {
    let (out, simulation) = (tempfile::tempdir().unwrap(), simulation());
    let out = out.path();
    let mut checkpoints = Checkpoints::open(out, &simulation).unwrap();
    // Under a tiling that a loss ended.
    put(&mut checkpoints, &simulation, 4, region([0, 192], [0, 20]));
    let folder = |step: u32| out.join(format!("checkpoints/step-{step}"));
    fs::write(folder(4).join("x0-192_y20-40_z0-1.cells.9.partial"), "half").unwrap();
    fs::write(folder(4).join("notes.txt"), "mine").unwrap();
    fs::create_dir_all(folder(7).join("deep")).unwrap();
    fs::write(folder(7).join("deep/file"), "mine").unwrap();
    cut().into_iter().for_each(|region| put(&mut checkpoints, &simulation, 4, region));
    checkpoints.complete(4, &cut()).unwrap();
    let named: BTreeSet<String> = cut().map(file_name).into_iter().chain([MANIFEST.to_owned()]).collect();
    assert_eq!(files(&folder(4)).into_iter().map(|(name, _)| name).collect::<BTreeSet<_>>(), named);
    assert!(folder(4).join("notes.txt").exists() && folder(7).join("deep/file").exists());
    // Parts of the next checkpoint arrive while this one is completed.
    put(&mut checkpoints, &simulation, 8, cut()[0]);
    cut().into_iter().for_each(|region| put(&mut checkpoints, &simulation, 6, region));
    checkpoints.complete(6, &cut()).unwrap();
    assert_eq!(files(&folder(8)).len(), 1);
    cut()[1..].iter().for_each(|region| put(&mut checkpoints, &simulation, 8, *region));
    checkpoints.complete(8, &cut()).unwrap();
    assert!(files(&folder(4)).is_empty() && folder(4).join("notes.txt").exists());
    assert!(folder(6).exists() && folder(8).exists());
}

#[test]
fn only_parts_and_manifests_have_names_of_this_module() {
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
