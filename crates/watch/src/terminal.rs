//! The board as a screen of a terminal, which the user controls with keys.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Once;
use std::time::{Duration, Instant};

use crossterm::cursor::{Hide, MoveTo, Show};
use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use crossterm::style::Print;
use crossterm::terminal::{
    BeginSynchronizedUpdate, Clear, ClearType, EndSynchronizedUpdate, EnterAlternateScreen,
    LeaveAlternateScreen, disable_raw_mode, enable_raw_mode, size,
};
use crossterm::{execute, queue};
use omnigrpo_observe::{escape, fit};

use crate::Error;
use crate::board::{Board, Selection, View};

/// Time between two looks at the files.
const EVERY: Duration = Duration::from_secs(1);
/// Longest delay until a request to stop is noticed.
const POLL: Duration = Duration::from_millis(100);
/// Number of lines that a key scrolls.
const PAGE: usize = 10;

const HELP: &str = "\
up, down        choose a run
left, right     choose a view; 1 to 4 open one
j, k            next and previous prompt
n, p            next and previous step with completions
page up, down   scroll the view
?               show or hide this list
q               quit; the runs go on";

impl Board {
    /// Shows the runs in `directories` as a screen of this process's terminal. Returns when the user quits or `stop` returns true.
    /// The terminal is restored then, and also by a panic.
    ///
    /// # Errors
    /// Returns an error if a directory contains no run, its files cannot be read, or the terminal fails.
    pub fn show(directories: &[PathBuf], stop: impl Fn() -> bool) -> Result<(), Error> {
        let mut board = Self::open(directories)?;
        let terminal = |error| Error::io("use", std::path::Path::new("the terminal"))(error);
        let _screen = Screen::open().map_err(terminal)?;
        let mut user = User::default();
        loop {
            board.look()?;
            draw(&board, &mut user).map_err(terminal)?;
            let next = Instant::now() + EVERY;
            while Instant::now() < next {
                if stop() {
                    return Ok(());
                }
                if !event::poll(POLL).map_err(terminal)? {
                    continue;
                }
                if let Event::Key(key) = event::read().map_err(terminal)?
                    && !user.press(key, board.len())
                {
                    return Ok(());
                }
                draw(&board, &mut user).map_err(terminal)?;
            }
        }
    }
}

/// The alternate screen in raw mode. Dropping it restores the terminal.
struct Screen;

impl Screen {
    fn open() -> io::Result<Self> {
        static RESTORE: Once = Once::new();
        RESTORE.call_once(|| {
            let usual = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                restore();
                usual(panic);
            }));
        });
        enable_raw_mode()?;
        let screen = Self;
        execute!(io::stdout(), EnterAlternateScreen, Hide)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn restore() {
    // The terminal may be gone already.
    let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}

/// Selection of the user, and whether the list of keys is shown.
#[derive(Default)]
struct User {
    chosen: Selection,
    help: bool,
}

impl User {
    /// Applies a key. Returns false if the user quits.
    fn press(&mut self, key: KeyEvent, runs: usize) -> bool {
        if key.kind == KeyEventKind::Release {
            return true;
        }
        let chosen = &mut self.chosen;
        let view = View::ALL.iter().position(|(view, _)| *view == chosen.view).unwrap_or(0);
        let before = *chosen;
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Char('q') => return false,
            KeyCode::Esc if self.help => self.help = false,
            KeyCode::Esc => return false,
            KeyCode::Char('?') => self.help = !self.help,
            KeyCode::Up => chosen.run = chosen.run.saturating_sub(1),
            KeyCode::Down => chosen.run = (chosen.run + 1).min(runs.saturating_sub(1)),
            KeyCode::Left => chosen.view = View::ALL[view.saturating_sub(1)].0,
            KeyCode::Right => chosen.view = View::ALL[(view + 1).min(View::ALL.len() - 1)].0,
            KeyCode::Char(digit @ '1'..='4') => chosen.view = View::ALL[digit as usize - '1' as usize].0,
            KeyCode::Char('j') => chosen.prompt += 1,
            KeyCode::Char('k') => chosen.prompt = chosen.prompt.saturating_sub(1),
            KeyCode::Char('n') => chosen.steps_back = chosen.steps_back.saturating_sub(1),
            KeyCode::Char('p') => chosen.steps_back += 1,
            KeyCode::PageUp => chosen.scroll = chosen.scroll.saturating_sub(PAGE),
            KeyCode::PageDown => chosen.scroll += PAGE,
            _ => {}
        }
        let what = |chosen: &Selection| (chosen.run, chosen.view, chosen.steps_back, chosen.prompt);
        if what(&before) != what(chosen) {
            chosen.scroll = 0;
        }
        true
    }
}

fn draw(board: &Board, user: &mut User) -> io::Result<()> {
    let (columns, rows) = size()?;
    let (width, height) = (usize::from(columns).max(1), usize::from(rows));
    let lines = screen(board, user, width, height);
    let mut out = io::stdout().lock();
    queue!(out, BeginSynchronizedUpdate)?;
    for (at, line) in (0..rows).zip(lines) {
        queue!(out, MoveTo(0, at), Print(fit(&escape(&line), width)), Clear(ClearType::UntilNewLine))?;
    }
    queue!(out, EndSynchronizedUpdate)?;
    out.flush()
}

/// Returns exactly `height` lines.
fn screen(board: &Board, user: &mut User, width: usize, height: usize) -> Vec<String> {
    let room = height.saturating_sub(2);
    let mut lines = match user.help {
        true => HELP.lines().map(str::to_owned).collect(),
        false => board.screen(&mut user.chosen, width, room),
    };
    lines.resize(room, String::new());
    lines.extend([String::new(), "q quit   ? keys   left, right views   up, down runs".to_owned()]);
    lines.truncate(height);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a run with two rewards, two evaluations, a problem, and two steps of two prompts.
    fn run(dir: &std::path::Path) {
        std::fs::create_dir_all(dir.join("rollouts")).unwrap();
        let metrics = concat!(
            "{\"step\":0,\"eval_reward\":0.25,\"eval_rewards/format/mean\":0.5}\n",
            "{\"step\":1,\"reward\":0.5,\"rewards/accuracy/mean\":0.0,\"rewards/accuracy/std\":0.1}\n",
            "{\"step\":2,\"reward\":0.75,\"rewards/accuracy/mean\":0.5,\"rewards/accuracy/std\":0.2}\n",
            "{\"step\":2,\"eval_reward\":0.75,\"eval_rewards/format/mean\":1}\n",
        );
        std::fs::write(dir.join("metrics.jsonl"), metrics).unwrap();
        let event = "{\"step\":2,\"time\":\"\",\"kind\":\"problem\",\"rule\":\"cut_off\",\"begins\":true,\"since\":1,\"text\":\"all completions are cut off\"}\n";
        std::fs::write(dir.join("events.jsonl"), event).unwrap();
        for step in [1, 2] {
            let line = |group: usize, sample: usize, reward: f64, text: &str| {
                format!(
                    "{{\"step\":{step},\"timestamp\":\"2023-11-14T22:13:20Z\",\"epoch\":0.0,\"id\":\"row {group}\",\"group\":{group},\
                     \"sample\":{sample},\"prompt\":\"<|im_start|>user\\nWhat is {group}?<|im_end|>\",\"completion\":\"{text}\",\
                     \"solution\":\"B\",\"rewards\":{{\"accuracy\":{reward}}},\"reward\":{reward},\"advantage\":{reward},\
                     \"length\":9,\"finish_reason\":\"stop\",\"media\":[]}}\n"
                )
            };
            let long = "it is a long story ".repeat(9);
            let lines = [line(0, 0, 0.5, "half\\u001b[2J"), line(1, 0, 0.0, "no"), line(1, 1, 1.0, &long)];
            std::fs::write(dir.join(format!("rollouts/step-{step:06}.jsonl")), lines.concat()).unwrap();
        }
    }

    fn board(directory: &std::path::Path) -> Board {
        let mut board = Board::open(&[directory.to_owned()]).unwrap();
        board.look().unwrap();
        board
    }

    fn press(user: &mut User, keys: &[KeyCode], runs: usize) {
        for &key in keys {
            assert!(user.press(KeyEvent::from(key), runs), "{key:?}");
        }
    }

    #[test]
    fn keys_choose_what_is_shown() {
        let directory = tempfile::tempdir().unwrap();
        run(directory.path());
        let (board, mut user) = (board(directory.path()), User::default());
        let mut shown = |keys: &[KeyCode]| {
            press(&mut user, keys, 1);
            let lines = screen(&board, &mut user, 60, 24);
            assert_eq!(lines.len(), 24);
            assert!(lines.iter().all(|line| line.chars().count() <= 60), "{lines:#?}");
            lines.join("\n")
        };
        let rewards = shown(&[]);
        assert!(
            rewards.contains("[rewards]") && rewards.contains("accuracy  0.500  0.200      ▁█"),
            "{rewards}"
        );
        let evaluations = shown(&[KeyCode::Right]);
        for row in [
            "step  reward  rewards/format/mean",
            "0      0.250                0.500",
            "2      0.750                1.000",
        ] {
            assert!(evaluations.contains(row), "{evaluations}");
        }
        let completions = shown(&[KeyCode::Char('3')]);
        assert!(
            completions.contains("step 2, prompt 1 of 2, 2 completions\n\nrow row 1: What is 1?"),
            "the prompt whose rewards differ most is the first: {completions}"
        );
        assert!(completions.contains("  best  +1.00 (accuracy 1.00) it is a long story"), "{completions}");
        assert!(completions.contains("  worst +0.00 (accuracy 0.00) no"), "{completions}");
        let next = shown(&[KeyCode::Char('j'), KeyCode::Char('p')]);
        assert!(
            next.contains("step 1, prompt 2 of 2, 1 completions") && next.contains("half\\u{1b}[2J"),
            "{next}"
        );
        // Both stop at the last one there is.
        let last = shown(&[KeyCode::Char('j'), KeyCode::Char('p'), KeyCode::Char('j'), KeyCode::Char('p')]);
        assert_eq!(last, next);
        assert!(shown(&[KeyCode::Char('n'), KeyCode::Char('k')]).contains("step 2, prompt 1 of 2"));
        assert!(shown(&[KeyCode::Char('4')]).contains("step 2: all completions are cut off"));
        let help = shown(&[KeyCode::Char('?')]);
        assert!(help.contains("next and previous prompt"), "{help}");
        assert!(shown(&[KeyCode::Esc]).contains("[problems]"));
    }

    #[test]
    fn keys_that_quit_and_limits() {
        let control = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        for key in [control, KeyEvent::from(KeyCode::Char('q')), KeyEvent::from(KeyCode::Esc)] {
            assert!(!User::default().press(key, 1));
        }
        let mut user = User::default();
        press(&mut user, &[KeyCode::Down, KeyCode::Down, KeyCode::Left], 2);
        assert_eq!((user.chosen.run, user.chosen.view), (1, View::Rewards));
        press(&mut user, &[KeyCode::Up, KeyCode::Up], 2);
        assert_eq!(user.chosen.run, 0);
    }

    #[test]
    fn a_view_longer_than_the_screen_scrolls_to_its_end() {
        let directory = tempfile::tempdir().unwrap();
        run(directory.path());
        let (board, mut user) = (board(directory.path()), User::default());
        press(&mut user, &[KeyCode::Char('3'), KeyCode::PageDown, KeyCode::PageDown], 1);
        let lines = screen(&board, &mut user, 30, 12);
        assert!(lines[9].contains("no"), "{lines:#?}");
        let end = user.chosen.scroll;
        press(&mut user, &[KeyCode::PageUp], 1);
        assert!(end > 0 && user.chosen.scroll == end.saturating_sub(PAGE));
        // The smallest screens show something.
        for (width, height) in [(1, 1), (1, 0), (200, 2)] {
            assert_eq!(screen(&board, &mut user, width, height).len(), height);
        }
    }
}
