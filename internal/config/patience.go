package config

import (
	"slices"
	"strings"
	"time"
)

// grace is how long what vanished from the files stays in force: an editor, a package
// upgrade or a synchroniser may put it back (spec §3).
const grace = 10 * time.Second

// Patience keeps in force for a while what vanished from the files. What they still say,
// if only that a driver is disabled, is no accident. The zero value is ready; it has one
// owner.
type Patience struct {
	files   []string             // of the last call
	drivers map[string]time.Time // vanished ones, and until when they are kept
	kubelet time.Time            // the same of the [kubelet] table; zero: not missing
}

// Kept is what Patience made of the files.
type Kept struct {
	Config   *Config   // to be in force
	Vanished []string  // drivers that the call before still found
	Kubelet  bool      // whether the [kubelet] table vanished in this call, with its file
	Next     time.Time // when the first of them has been away for long enough; zero: none is away
}

// Keep adds to what the files say, without a mistake, what has been away from them for
// less than 10 s of what is in force.
func (p *Patience) Keep(inForce *Config, r *Result, now time.Time) Kept {
	c := *r.Config
	k := Kept{Config: &c}
	missing := p.kubelet
	if missing.IsZero() && slices.ContainsFunc(p.files, func(f string) bool { return !slices.Contains(r.Files, f) }) {
		missing = now.Add(grace)
	}
	p.files = r.Files
	switch {
	case c.Kubelet == inForce.Kubelet, !now.Before(missing): // zero, too
		p.kubelet = time.Time{}
	default:
		k.Kubelet = p.kubelet.IsZero()
		p.kubelet, k.Next = missing, missing
		c.Kubelet = inForce.Kubelet
	}

	away := make(map[string]time.Time)
	for _, d := range inForce.Drivers {
		if _, there := c.Driver(d.Name); there || !d.Enabled || c.hasSocket(d) {
			continue
		}
		until, known := p.drivers[d.Name]
		if !known {
			until = now.Add(grace)
			k.Vanished = append(k.Vanished, d.Name)
		}
		if !now.Before(until) {
			continue
		}
		away[d.Name] = until
		if k.Next.IsZero() || until.Before(k.Next) {
			k.Next = until
		}
		c.Drivers = append(c.Drivers[:len(c.Drivers):len(c.Drivers)], d)
		slices.SortFunc(c.Drivers, func(a, b Driver) int { return strings.Compare(a.Name, b.Name) })
	}
	p.drivers = away
	return k
}

// Begin forgets what vanished: all that the files say is in force, and nothing else.
func (p *Patience) Begin(r *Result) { *p = Patience{files: r.Files} }

// hasSocket tells whether another driver has this one's place now: it was renamed.
func (c *Config) hasSocket(d Driver) bool {
	return slices.ContainsFunc(c.Drivers, func(o Driver) bool {
		return o.Enabled && (o.Socket == d.Socket || o.Endpoint == d.Endpoint)
	})
}
