package config

import (
	"slices"
	"time"
)

// gracePeriod is how long what disappeared from the files stays in force: an editor, a
// package upgrade or a synchroniser may put it back.
const gracePeriod = 10 * time.Second

// InForce is a configuration without errors that counts, or is about to.
type InForce struct {
	*Config
	Files       []string // that it was made of, in the order in which they were applied
	RootDirFile string   // the one that has kubelet.root_dir; empty: none has
}

// Equal reports whether both say the same, and are made of the same files.
func (c *InForce) Equal(o *InForce) bool {
	return c.Config.Equal(o.Config) && slices.Equal(c.Files, o.Files) && c.RootDirFile == o.RootDirFile
}

// InForce is what the files say, to be in force.
func (r *Result) InForce() *InForce {
	return &InForce{r.Config, r.Files, r.origins["kubelet.root_dir"].file.path}
}

// Grace keeps in force for a while what disappeared from the files: a driver's table, or
// root_dir with its file. What they still say, if only that a driver is disabled, counts at
// once. A driver that must stay for longer, because without its registration the kubelet
// cannot unmount its volumes, gets one grace period after the other. The zero value is ready;
// it has one owner.
type Grace struct {
	drivers map[string]time.Time // that disappeared, and until when they are kept
	rootDir time.Time            // the same of root_dir; zero: it did not disappear
}

// Kept is what Grace made of the files.
type Kept struct {
	*InForce              // to be in force
	Disappeared []string  // drivers that the call before still found
	Staying     []Driver  // that stay for longer since this call
	RootDir     bool      // whether root_dir disappeared since the call before
	Next        time.Time // when the first grace period ends; zero: there is none
}

// Keep adds to what the files say, without an error, what disappeared from them less than
// the grace period ago. inForce is what was in force before, perhaps in another process.
// mustStay says why a driver cannot go at the end of its grace period; empty: it can.
func (g *Grace) Keep(inForce *InForce, r *Result, now time.Time, mustStay func(name string) string) Kept {
	k := Kept{InForce: r.InForce()}
	c := &Config{r.Config.Kubelet, r.Config.Log, slices.Clone(r.Config.Drivers)}
	k.Config = c
	until := func(known time.Time) (end time.Time, keep bool) {
		if known.IsZero() {
			known = now.Add(gracePeriod)
		}
		if keep = now.Before(known); keep && (k.Next.IsZero() || known.Before(k.Next)) {
			k.Next = known
		}
		return known, keep
	}

	file := inForce.RootDirFile
	if c.Kubelet == inForce.Kubelet || file == "" || slices.Contains(r.Files, file) {
		g.rootDir = time.Time{}
	} else if end, keep := until(g.rootDir); keep {
		k.RootDir = g.rootDir.IsZero()
		g.rootDir, c.Kubelet, k.RootDirFile = end, inForce.Kubelet, file
	}

	kept := make(map[string]time.Time)
	for _, d := range inForce.Drivers {
		if _, there := c.Driver(d.Name); there || !d.Enabled || hasSocket(r.Config, d) {
			continue
		}
		known, before := g.drivers[d.Name]
		if !before {
			k.Disappeared = append(k.Disappeared, d.Name)
		}
		end, keep := until(known)
		if !keep {
			before := d.KeptFor
			if d.KeptFor = mustStay(d.Name); d.KeptFor == "" {
				continue
			}
			if before == "" {
				k.Staying = append(k.Staying, d)
			}
			end, _ = until(time.Time{})
		}
		kept[d.Name] = end
		c.Drivers = append(c.Drivers, d)
	}
	g.drivers = kept
	sortByName(c.Drivers)
	return k
}

// hasSocket reports whether another driver has this one's socket now: it was renamed.
func hasSocket(c *Config, d Driver) bool {
	return slices.ContainsFunc(c.Drivers, func(o Driver) bool {
		return o.Enabled && (o.Socket == d.Socket || o.Endpoint == d.Endpoint)
	})
}
