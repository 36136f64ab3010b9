//! Connections that end the run on all ranks if one of them ends.
//!
//! A rank in a collective waits forever for one that is gone, because engines notice it late or never. Every rank therefore has
//! a TCP connection to the first one. The system closes the connections of a process that ends, however it ends, and a machine
//! that is unreachable sends no more signs of life. The first rank then tells the others which rank was lost.
//!
//! Only ranks of the run can connect: each sends a secret that the first rank created and that the engine carried, and waits for
//! an answer. Connections that have not sent it within [`GREETING`], or the oldest of more than [`STRANGERS`] ones, are closed. A
//! rank whose connection is closed before the answer connects again, so strangers delay the start but cannot prevent it.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use omnigrpo_guard::Fault;

use crate::queue::{self, TAKE, Work};
use crate::{Error, Queue, Ranks, Result, host_name};

/// Pause between two signs of life.
const PULSE: Duration = Duration::from_secs(3);
/// Default of the maximum time without a sign of life, after which a rank counts as lost. A rank gives one every 3 s.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Maximum time until all ranks have connected.
const START: Duration = Duration::from_secs(30);
/// Maximum number of connections that have not sent the secret yet.
const STRANGERS: usize = 64;
/// Maximum time from a connection to its secret, and from the secret to the answer.
const GREETING: Duration = Duration::from_secs(2);
/// Maximum length of a message, in bytes.
const LONGEST: u64 = 4096;

const ALIVE: u8 = b'.';
const DONE: u8 = b'!';
/// Byte before the message that a rank was lost. A line feed ends the message.
const LOST: u8 = b'?';

/// Handler of the messages about work ([`Queue`]).
type OnWork = Box<dyn FnMut(&mut TcpStream) -> std::io::Result<()> + Send>;

/// First bytes of a connection: the secret, then the number of the rank, little-endian.
type Hello = [u8; 24];

type Peer = Arc<Mutex<TcpStream>>;

/// Watch over the other ranks. It ends when it is dropped.
pub struct Lifeline {
    over: Arc<AtomicBool>,
    peers: Vec<Peer>,
    queue: Queue,
}

/// Function that is called with a sentence if a rank is lost.
type OnLost = Arc<dyn Fn(&str) + Send + Sync>;

impl Lifeline {
    /// Connects all ranks to the first one. `who` describes this rank for people (its process and machine). `address` is the
    /// address of the first rank for the others; without it, the loopback interface is used if all ranks share a machine, else
    /// the interface of the first rank that leads to the others. A rank that gives no sign of life for the time `patience` counts as
    /// ended; the default is [`PATIENCE`]. If a rank ends before its lifeline was dropped, `lost` is called
    /// once on another thread. It must end the process with `_exit`: exit handlers of MPI would wait for the other ranks.
    ///
    /// # Errors
    /// Returns an error on all ranks if a connection cannot be made.
    pub fn new(
        ranks: &Ranks,
        who: &str,
        address: Option<IpAddr>,
        patience: Duration,
        lost: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        if ranks.size() == 1 {
            return Ok(Self { over, peers: Vec::new(), queue: Queue::here(Arc::default(), 0) });
        }
        let lost: OnLost = Arc::new(lost);
        let names: Vec<(String, String)> = ranks.share((who.to_owned(), host_name()))?;
        let name = |rank: usize| format!("rank {rank} ({})", names[rank].0);

        let opened = if ranks.is_first() {
            let hosts: Vec<&str> = names.iter().map(|(_, host)| host.as_str()).collect();
            listen(address, &hosts).map(Some)
        } else {
            Ok(None)
        };
        let opened = ranks.agree(opened, |_| Fault::Run)?;
        let meeting = opened.as_ref().map(|(_, address, secret)| (address.to_string(), *secret));
        let meeting = ranks.share(meeting)?.into_iter().next().flatten();
        let (meeting, secret) = meeting.ok_or_else(|| failed("the first rank has published no address"))?;

        let connected = match opened {
            Some((listener, ..)) => accept_all(listener, secret, ranks.size()),
            None => join(&meeting, secret, ranks.rank()).map(|stream| vec![(0, stream)]),
        };
        let mut peers: Vec<(usize, Peer)> = Vec::new();
        for (rank, stream) in ranks.agree(connected, |_| Fault::Run)? {
            let limits = [stream.set_read_timeout(Some(patience)), stream.set_write_timeout(Some(patience))];
            limits.into_iter().collect::<std::io::Result<()>>().map_err(failed)?;
            peers.push((rank, Arc::new(Mutex::new(stream))));
        }
        let all: Vec<Peer> = peers.iter().map(|(_, peer)| Arc::clone(peer)).collect();
        let work: Arc<Mutex<Work>> = Arc::default();
        let (answer, answers) = channel();
        for (rank, peer) in &peers {
            let on_work: OnWork = if ranks.is_first() {
                let (rank, work, peer) = (*rank, Arc::clone(&work), Arc::clone(peer));
                Box::new(move |_| {
                    let mut work = work.lock().unwrap_or_else(PoisonError::into_inner);
                    work.answer(rank, &mut lock(&peer))
                })
            } else {
                let answer = answer.clone();
                Box::new(move |stream| queue::receive(stream, &answer))
            };
            let (others, lost) = (if ranks.is_first() { all.clone() } else { Vec::new() }, Arc::clone(&lost));
            watch(peer, &name(*rank), Arc::clone(&over), patience, on_work, move |what| {
                // Ranks that are still there learn it from here. Those that cannot be reached are lost as well.
                for other in &others {
                    let _ = lock(other).write_all(format!("{}{what}\n", LOST as char).as_bytes());
                }
                lost(what);
            })?;
        }
        pulse(all.clone(), Arc::clone(&over), PULSE)?;
        let queue = match all.first().filter(|_| !ranks.is_first()) {
            Some(first) => Queue::at_first(Arc::clone(first), Arc::new(Mutex::new(answers))),
            None => Queue::here(work, 0),
        };
        Ok(Self { over, peers: all, queue })
    }

    /// Returns the access of this rank to the work of all ranks.
    pub fn queue(&self) -> Queue {
        self.queue.clone()
    }
}

impl Drop for Lifeline {
    /// Tells the other ranks that this one ends as it should. While a panic unwinds, it closes the connections instead, so that
    /// they learn of it.
    fn drop(&mut self) {
        if thread::panicking() {
            for peer in &self.peers {
                let _ = lock(peer).shutdown(Shutdown::Both);
            }
            return;
        }
        self.over.store(true, Ordering::SeqCst);
        for peer in &self.peers {
            // A rank that is gone needs no farewell.
            let _ = lock(peer).write_all(&[DONE]);
        }
    }
}

fn failed(what: impl std::fmt::Display) -> Error {
    Error::Lifeline { what: format!("the ranks cannot watch each other: {what}") }
}

fn lock(stream: &Mutex<TcpStream>) -> MutexGuard<'_, TcpStream> {
    stream.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens the port of the first rank and returns it with its address and a new secret.
fn listen(address: Option<IpAddr>, hosts: &[&str]) -> Result<(TcpListener, SocketAddr, [u8; 16])> {
    let address = match address {
        Some(address) => address,
        None if hosts.iter().all(|host| *host == hosts[0]) => IpAddr::from([127, 0, 0, 1]),
        None => own_address(hosts)
            .ok_or_else(|| failed(format!("no address of {} for the other machines was found", hosts[0])))?,
    };
    let listener = TcpListener::bind((address, 0)).map_err(|e| failed(format!("{address}: {e}")))?;
    let address = listener.local_addr().map_err(failed)?;
    let mut secret = [0; 16];
    getrandom::fill(&mut secret).map_err(failed)?;
    Ok((listener, address, secret))
}

/// Returns the address of the interface that leads from this machine, the first of `hosts`, to another one.
fn own_address(hosts: &[&str]) -> Option<IpAddr> {
    let remote = hosts.iter().find(|host| **host != hosts[0])?;
    let towards = |to: SocketAddr| {
        let from: IpAddr = if to.is_ipv4() { [0, 0, 0, 0].into() } else { [0u16; 8].into() };
        let socket = UdpSocket::bind((from, 0)).ok()?;
        // This sends nothing; the system only chooses the route.
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_loopback())
    };
    let route = (*remote, 9).to_socket_addrs().ok().and_then(|mut found| found.find_map(towards));
    let named = || (hosts[0], 9).to_socket_addrs().ok()?.map(|own| own.ip()).find(|ip| !ip.is_loopback());
    route.or_else(named)
}

/// Connects a rank to the first one.
fn join(address: &str, secret: [u8; 16], rank: usize) -> Result<TcpStream> {
    let address: SocketAddr = address.parse().map_err(|e| failed(format!("{address}: {e}")))?;
    let connect = || {
        let mut stream = TcpStream::connect_timeout(&address, START / 3)?;
        stream.set_nodelay(true)?;
        stream.write_all(&hello(secret, rank))?;
        stream.set_read_timeout(Some(GREETING))?;
        stream.read_exact(&mut [0])?;
        Ok(stream)
    };
    let until = Instant::now() + START;
    loop {
        match connect() {
            Ok(stream) => return Ok(stream),
            Err(_) if Instant::now() < until => thread::sleep(Duration::from_millis(20)),
            Err(e) => {
                let e: std::io::Error = e;
                return Err(failed(format!("the first rank does not answer at {address}: {e}")));
            }
        }
    }
}

fn hello(secret: [u8; 16], rank: usize) -> Hello {
    let mut hello = [0; 24];
    hello[..16].copy_from_slice(&secret);
    hello[16..].copy_from_slice(&(rank as u64).to_le_bytes());
    hello
}

/// Accepts connections until each other rank has one.
fn accept_all(listener: TcpListener, secret: [u8; 16], size: usize) -> Result<Vec<(usize, TcpStream)>> {
    let until = Instant::now() + START;
    let (send, arrived) = channel();
    let over = Arc::new(AtomicBool::new(false));
    listener.set_nonblocking(true).map_err(failed)?;
    let stop = Arc::clone(&over);
    let accepting = thread::Builder::new().name("lifeline".to_owned());
    accepting.spawn(move || accept(&listener, secret, &send, &stop)).map_err(failed)?;
    let found = gather(&arrived, size, until);
    over.store(true, Ordering::SeqCst);
    found
}

/// Connection that has not sent the secret yet.
struct Stranger {
    stream: TcpStream,
    said: Vec<u8>,
    until: Instant,
}

impl Stranger {
    /// Reads what has arrived. Returns the rank if the secret is complete and right, and an error if the connection is of no use.
    fn greet(&mut self, secret: [u8; 16]) -> std::io::Result<Option<usize>> {
        let mut bytes: Hello = [0; 24];
        let open = bytes.len() - self.said.len();
        match self.stream.read(&mut bytes[..open]) {
            Ok(count) if count > 0 => self.said.extend_from_slice(&bytes[..count]),
            Err(e) if e.kind() == ErrorKind::WouldBlock && Instant::now() < self.until => return Ok(None),
            _ => return Err(ErrorKind::TimedOut.into()),
        }
        let Ok(said) = Hello::try_from(self.said.as_slice()) else { return Ok(None) };
        let rank = u64::from_le_bytes(said[16..].try_into().unwrap_or_default()) as usize;
        if said != hello(secret, rank) {
            return Err(ErrorKind::PermissionDenied.into());
        }
        self.stream.set_nonblocking(false)?;
        self.stream.set_nodelay(true)?;
        self.stream.write_all(&[ALIVE])?;
        Ok(Some(rank))
    }
}

/// Accepts connections until `over` is true, and sends those with the secret to `found`.
fn accept(listener: &TcpListener, secret: [u8; 16], found: &Sender<(usize, TcpStream)>, over: &AtomicBool) {
    let mut strangers: Vec<Stranger> = Vec::new();
    while !over.load(Ordering::SeqCst) {
        // In one round, there are at most as many new connections as may stay.
        for _ in 0..STRANGERS {
            let Ok((stream, _)) = listener.accept() else { break };
            let until = Instant::now() + GREETING;
            if stream.set_nonblocking(true).is_ok() {
                strangers.push(Stranger { stream, said: Vec::new(), until });
            }
        }
        let mut known = Vec::new();
        strangers.retain_mut(|stranger| match stranger.greet(secret) {
            Ok(None) => true,
            Ok(Some(rank)) => {
                known.extend(stranger.stream.try_clone().ok().map(|stream| (rank, stream)));
                false
            }
            Err(_) => false,
        });
        // Without a receiver, all ranks have been found.
        known.into_iter().for_each(|own| drop(found.send(own)));
        strangers.drain(..strangers.len().saturating_sub(STRANGERS));
        thread::sleep(Duration::from_millis(5));
    }
}

/// Collects a connection for each rank but the first.
fn gather(
    arrived: &Receiver<(usize, TcpStream)>,
    size: usize,
    until: Instant,
) -> Result<Vec<(usize, TcpStream)>> {
    let mut found: Vec<(usize, TcpStream)> = Vec::new();
    while found.len() + 1 < size {
        match arrived.recv_timeout(until.saturating_duration_since(Instant::now())) {
            // A rank that connects again has lost its earlier connection.
            Ok((rank, stream)) if (1..size).contains(&rank) => {
                found.retain(|(own, _)| *own != rank);
                found.push((rank, stream));
            }
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let absent = (1..size).filter(|rank| found.iter().all(|(own, _)| own != rank));
                let absent: Vec<String> = absent.map(|rank| rank.to_string()).collect();
                let absent = absent.join(", ");
                return Err(failed(format!("rank {absent} did not connect within {} s", START.as_secs())));
            }
        }
    }
    Ok(found)
}

/// Sends signs of life.
fn pulse(peers: Vec<Peer>, over: Arc<AtomicBool>, pause: Duration) -> Result<()> {
    let beat = move || {
        while !over.load(Ordering::SeqCst) {
            for peer in &peers {
                // The thread that reads from the peer notices a failure.
                let _ = lock(peer).write_all(&[ALIVE]);
            }
            thread::sleep(pause);
        }
    };
    thread::Builder::new().name("lifeline".to_owned()).spawn(beat).map(drop).map_err(failed)
}

/// Reads the messages of a peer until it ends as it should. Calls `lost` if it ends otherwise.
fn watch(
    peer: &Mutex<TcpStream>,
    name: &str,
    over: Arc<AtomicBool>,
    patience: Duration,
    mut on_work: OnWork,
    lost: impl FnOnce(&str) + Send + 'static,
) -> Result<()> {
    let (mut stream, name) = (lock(peer).try_clone().map_err(failed)?, name.to_owned());
    let read = move || {
        if let Some(what) = listen_to(&mut stream, &name, patience, &mut on_work)
            // A rank that has ended as it should misses no other.
            && !over.load(Ordering::SeqCst)
        {
            lost(&what);
        }
    };
    thread::Builder::new().name("lifeline".to_owned()).spawn(read).map(drop).map_err(failed)
}

/// Returns the reason why a rank is lost, or `None` if the peer ended as it should.
fn listen_to(stream: &mut TcpStream, name: &str, patience: Duration, on_work: &mut OnWork) -> Option<String> {
    let mut byte = [0u8];
    loop {
        match stream.read(&mut byte) {
            Ok(1) if byte[0] == ALIVE => {}
            Ok(1) if byte[0] == DONE => return None,
            Ok(1) if byte[0] == TAKE => {
                if let Err(error) = on_work(stream) {
                    return Some(format!("{name} has ended ({error})"));
                }
            }
            Ok(1) if byte[0] == LOST => {
                let mut text = Vec::new();
                // A message that ends early is reported as far as it goes.
                let _ = BufReader::new(stream.take(LONGEST)).read_until(b'\n', &mut text);
                text.pop_if(|byte| *byte == b'\n');
                return Some(String::from_utf8_lossy(&text).replace(char::is_control, " "));
            }
            Ok(1) => return Some(format!("{name} has sent an unknown message, byte {}", byte[0])),
            Ok(_) => return Some(format!("{name} has ended")),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Some(format!("{name} has given no sign of life for {} s", patience.as_secs()));
            }
            Err(error) => return Some(format!("{name} has ended ({error})")),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Threads;

    const SECRET: [u8; 16] = [7; 16];

    /// Opens a port, lets `strangers` use it and connects ranks 1 and 2. Returns the ranks that were accepted, in order.
    fn ranks_among(strangers: impl Fn(SocketAddr) -> Vec<TcpStream> + Send) -> Vec<usize> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let mut found: Vec<usize> = thread::scope(|scope| {
            let accepted = scope.spawn(|| accept_all(listener, SECRET, 3).unwrap());
            let kept = strangers(address);
            let started = Instant::now();
            let ranks: Vec<_> = [2, 1]
                .map(|rank| scope.spawn(move || join(&address.to_string(), SECRET, rank).unwrap()))
                .into();
            let ranks: Vec<TcpStream> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            let found = accepted.join().unwrap();
            assert!(started.elapsed() < START / 3, "a stranger has delayed the start");
            drop((kept, ranks));
            found.into_iter().map(|(rank, _)| rank).collect()
        });
        found.sort_unstable();
        found
    }

    #[test]
    fn idle_strangers_do_not_keep_ranks_out() {
        let idle = |address| (0..5 * STRANGERS).map(|_| TcpStream::connect(address).unwrap()).collect();
        assert_eq!(ranks_among(idle), [1, 2]);
    }

    /// A rank whose connection is closed before the answer connects again.
    #[test]
    fn a_rank_that_was_shut_out_connects_again() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::scope(|scope| {
            let rank = scope.spawn(|| join(&address, SECRET, 1).unwrap());
            drop(listener.accept().unwrap());
            assert_eq!(accept_all(listener, SECRET, 2).unwrap()[0].0, 1);
            drop(rank.join().unwrap());
        });
    }

    fn say(address: SocketAddr, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    }

    #[test]
    fn only_ranks_with_the_secret_are_accepted() {
        assert_eq!(ranks_among(|_| Vec::new()), [1, 2]);
        // The wrong secret, garbage that is too short or too long, nothing at all, and one that closes at once.
        let hostile = |address| {
            let mut wrong = hello(SECRET, 1);
            wrong[15] ^= 1;
            drop(TcpStream::connect(address).unwrap());
            let mut kept =
                vec![say(address, &wrong), say(address, b"GET / HTTP/1.1\r\n\r\n"), say(address, &[0; 4096])];
            kept.extend((0..5).map(|_| TcpStream::connect(address).unwrap()));
            kept
        };
        assert_eq!(ranks_among(hostile), [1, 2]);
        // A rank that does not exist, the first rank itself, and one that connects twice.
        let repeated =
            |address| [9, 0, 2].map(|rank| say(address, &hello(SECRET, rank))).into_iter().collect();
        assert_eq!(ranks_among(repeated), [1, 2]);
    }

    #[test]
    fn messages_of_a_peer_are_understood() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let heard = |bytes: &[u8], closes: bool| {
            let peer = say(listener.local_addr().unwrap(), bytes);
            let (mut stream, _) = listener.accept().unwrap();
            let patience = Duration::from_millis(200);
            stream.set_read_timeout(Some(patience)).unwrap();
            let kept = (!closes).then_some(peer);
            let mut on_work: OnWork = Box::new(|_| Ok(()));
            let heard = listen_to(&mut stream, "rank 1", patience, &mut on_work);
            drop(kept);
            heard
        };
        assert_eq!(heard(b"..!", true), None);
        assert_eq!(heard(b"...", true).unwrap(), "rank 1 has ended");
        assert_eq!(heard(b".", false).unwrap(), "rank 1 has given no sign of life for 0 s");
        assert_eq!(heard(b"?rank 2 has\x1b[2J ended\n", false).unwrap(), "rank 2 has [2J ended");
        assert_eq!(heard(b".x", true).unwrap(), "rank 1 has sent an unknown message, byte 120");
        let long = [b"?".as_slice(), &[b'a'; 10_000]].concat();
        assert_eq!(heard(&long, true).unwrap().len(), LONGEST as usize);
    }

    /// Rank 1 of three leaves without a farewell: the two others hear its name, and a run that ends as it should hears nothing.
    #[test]
    fn the_others_learn_which_rank_is_lost() {
        for fails in [false, true] {
            let heard: Vec<Vec<String>> = thread::scope(|scope| {
                let all: Vec<_> = Threads::new(3)
                    .into_iter()
                    .map(|engine| {
                        scope.spawn(move || {
                            let ranks = Ranks::new(engine);
                            let (send, lost) = channel();
                            let who = format!("process {}", 10 + ranks.rank());
                            let line = Lifeline::new(&ranks, &who, None, PATIENCE, move |what| {
                                drop(send.send(what.to_owned()))
                            })
                            .unwrap();
                            if fails && ranks.rank() == 1 {
                                let shut =
                                    |peer: &Peer| lock(peer).shutdown(std::net::Shutdown::Both).unwrap();
                                line.peers.iter().for_each(shut);
                                line.over.store(true, Ordering::SeqCst);
                                return Vec::new();
                            }
                            if fails {
                                let heard = lost.recv_timeout(Duration::from_secs(20)).unwrap();
                                return vec![heard];
                            }
                            // Each of five pieces of work is taken once.
                            line.queue().open(&[0, 0, 2, 1, 2]);
                            ranks.barrier().unwrap();
                            let taken: Vec<u64> = std::iter::from_fn(|| line.queue().take().unwrap())
                                .map(|piece| piece as u64)
                                .collect();
                            let mut all = ranks.share(taken).unwrap().concat();
                            all.sort_unstable();
                            assert_eq!(all, [0, 1, 2, 3, 4]);
                            drop(line);
                            ranks.barrier().unwrap();
                            lost.try_iter().collect()
                        })
                    })
                    .collect();
                all.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            let name = vec!["rank 1 (process 11) has ended".to_owned()];
            let expected = if fails { [name.clone(), Vec::new(), name] } else { Default::default() };
            assert_eq!(heard.as_slice(), expected.as_slice());
        }
    }
}
