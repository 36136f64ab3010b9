// Media of a record: pictures, clips with marks for the sampled frames, and sound with its waveform.

import { el, isFile, kept, link, number } from './shared.js';

const MAX_WAVE_BYTES = 64e6;
const WAVE_COLUMNS = 600;

/// Shows the media of a record. `where` names the record: run, step, and group or row.
export function gallery(media, where) {
  return el('div', { class: 'media' }, media.map((medium, at) => (isFile ? copy(medium, kept(where, at)) : figure(medium, link('media', { ...where, at })))));
}

/// Shows the small copy of a medium in a report: a picture, the frames of a clip side by side, or a sound.
function copy(medium, own) {
  const name = medium.name ?? 'medium';
  if (!own) return el('figure', {}, el('figcaption', {}, `${name}: ${medium.error ?? 'not in the report'}`));
  const caption = el('figcaption', {}, name, own.times.length ? ` · frames at ${own.times.map((time) => number(time, 2)).join(', ')} s` : '');
  if (own.src.startsWith('data:audio/')) return el('figure', {}, el('audio', { src: own.src, controls: true }), caption);
  return el('figure', {}, el('img', { src: own.src, alt: name }), caption);
}

function figure(medium, url) {
  const caption = el('figcaption', {}, medium.name ?? 'medium');
  if (medium.error) return el('figure', {}, el('p', { class: 'quiet' }, medium.error), caption);
  const kind = medium.heard ? 'audio' : medium.mime.split('/')[0];
  const times = medium.times ?? [];
  if (times.length) caption.append(` · ${times.length} frames sampled`);
  const unplayable = () => body.replaceWith(el('p', { class: 'quiet' }, `This browser cannot show ${medium.mime}. `, el('a', { href: url, download: medium.name ?? 'medium' }, 'Save the file')));
  let body;
  const extra = [];
  if (kind === 'image') {
    body = el('img', { src: url, alt: medium.name ?? 'picture', class: medium.stored ? 'stored' : '', loading: 'lazy', onerror: unplayable });
    if (times.length) extra.push(strip(url, medium.mime, times));
  } else if (kind === 'video') {
    body = el('video', { src: url, controls: true, preload: 'metadata', playsInline: true, onerror: unplayable });
    if (times.length) extra.push(timeline(body, times));
  } else {
    body = el('audio', { src: url, controls: true, preload: 'metadata', onerror: unplayable });
    extra.push(waveform(body, url));
  }
  return el('figure', {}, body, extra, caption);
}

/// Draws a timeline of the clip with a mark for each sampled frame. A click on a mark seeks to its frame.
function timeline(video, times) {
  const bar = el('div', { class: 'timeline', role: 'group', 'aria-label': 'sampled frames' });
  const now = el('span', { class: 'now' });
  video.addEventListener('loadedmetadata', () => {
    const length = Math.max(video.duration, times.at(-1), 1e-3);
    bar.replaceChildren(now, ...times.map((time) => {
      const mark = el('button', { type: 'button', title: `sampled frame at ${number(time)} s`, 'aria-label': `to ${number(time)} s`, onclick: () => { video.pause(); video.currentTime = time; } });
      mark.style.left = `${(100 * time) / length}%`;
      return mark;
    }));
  });
  video.addEventListener('timeupdate', () => { now.style.left = `${(100 * video.currentTime) / (video.duration || 1)}%`; });
  return bar;
}

/// Shows the frames of an animation and marks the sampled ones, if the browser can decode it.
function strip(url, mime, times) {
  const box = el('div', { class: 'strip' }, el('span', { class: 'quiet' }, `sampled at ${times.map((time) => number(time, 2)).join(', ')} s`));
  if (!('ImageDecoder' in globalThis)) return box;
  (async () => {
    const decoder = new ImageDecoder({ data: (await fetch(url)).body, type: mime });
    await decoder.completed;
    const count = Math.min(decoder.tracks.selectedTrack.frameCount, 64);
    const frames = [];
    let start = 0;
    for (let at = 0; at < count; at += 1) {
      const { image } = await decoder.decode({ frameIndex: at });
      const length = (image.duration ?? 100000) / 1e6;
      const sampled = times.some((time) => time >= start - 1e-6 && time < start + length - 1e-6);
      const canvas = el('canvas', { width: image.displayWidth, height: image.displayHeight, class: sampled ? 'sampled' : '', title: `${number(start, 2)} s${sampled ? ', sampled' : ''}` });
      canvas.getContext('2d').drawImage(image, 0, 0);
      image.close();
      frames.push(canvas);
      start += length;
    }
    box.prepend(...frames);
  })().catch(() => { /* the times stand below */ });
  return box;
}

/// Draws the waveform of a sound. A click seeks to that time.
function waveform(audio, url) {
  const canvas = el('canvas', { class: 'wave', width: WAVE_COLUMNS, height: 64, role: 'img', 'aria-label': 'waveform' });
  canvas.addEventListener('click', (event) => {
    if (audio.duration) audio.currentTime = (event.offsetX / canvas.clientWidth) * audio.duration;
  });
  (async () => {
    const response = await fetch(url);
    if (Number(response.headers.get('content-length')) > MAX_WAVE_BYTES) {
      await response.body.cancel();
      canvas.remove();
      return;
    }
    const sound = await new OfflineAudioContext(1, 1, 16000).decodeAudioData(await response.arrayBuffer());
    const samples = sound.getChannelData(0);
    const peaks = Array.from({ length: WAVE_COLUMNS }, (_, column) => {
      let peak = 0;
      const end = Math.floor(((column + 1) * samples.length) / WAVE_COLUMNS);
      for (let at = Math.floor((column * samples.length) / WAVE_COLUMNS); at < end; at += 1) peak = Math.max(peak, Math.abs(samples[at]));
      return peak;
    });
    const draw = () => {
      const style = getComputedStyle(document.documentElement);
      const context = canvas.getContext('2d');
      context.clearRect(0, 0, canvas.width, canvas.height);
      const played = audio.duration ? audio.currentTime / audio.duration : 0;
      peaks.forEach((peak, column) => {
        context.fillStyle = style.getPropertyValue(column / WAVE_COLUMNS < played ? '--accent' : '--quiet');
        const size = Math.max(1, peak * 60);
        context.fillRect(column, 32 - size / 2, 1, size);
      });
    };
    draw();
    audio.addEventListener('timeupdate', draw);
  })().catch(() => canvas.remove());
  return canvas;
}
